// The camera: one picture, or one after the other as fast as the model answers.

const FRAME_MS = 30;

export class Camera {
  // `onFrame` gets a JPEG and returns a promise of whether it failed; the next live frame waits for it.
  constructor({ video, live, onFrame }) {
    Object.assign(this, { video, live, onFrame, stream: null });
  }

  async open() {
    if (!navigator.mediaDevices?.getUserMedia) {
      throw new Error("This browser gives no camera to a page that came without TLS. Use localhost, or https.");
    }
    try {
      this.stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" }, audio: false });
    } catch (error) {
      const why = { NotAllowedError: "it was not allowed", NotFoundError: "there is none", NotReadableError: "another program uses it" };
      throw new Error(`The camera cannot be used: ${why[error.name] ?? error.message}.`);
    }
    this.video.srcObject = this.stream;
    await this.video.play();
    this.follow(this.stream);
  }

  close() {
    this.stream?.getTracks().forEach((track) => track.stop());
    this.stream = null;
    this.video.srcObject = null;
    this.live.checked = false;
  }

  async snap() {
    const canvas = document.createElement("canvas");
    canvas.width = this.video.videoWidth;
    canvas.height = this.video.videoHeight;
    canvas.getContext("2d").drawImage(this.video, 0, 0);
    const blob = await new Promise((done) => canvas.toBlob(done, "image/jpeg", 0.92));
    return blob ? this.onFrame(blob) : true;
  }

  async follow(stream) {
    while (this.stream === stream) {
      // After an error it stops: the error would repeat with every frame.
      if (this.live.checked && this.video.videoWidth && (await this.snap())) this.live.checked = false;
      await new Promise((done) => setTimeout(done, FRAME_MS));
    }
  }
}
