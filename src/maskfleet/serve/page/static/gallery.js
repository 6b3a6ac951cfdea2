// The images of the validation set, a page at a time.

import { json } from "/api.js";

const PER_PAGE = 24;
const element = (id) => document.getElementById(id);

export class Gallery {
  constructor({ onChoose, onError }) {
    Object.assign(this, { onChoose, onError, start: 0 });
    element("previous").addEventListener("click", () => this.show(this.start - PER_PAGE));
    element("next").addEventListener("click", () => this.show(this.start + PER_PAGE));
    element("gallery").hidden = false;
  }

  async show(start) {
    try {
      const { images, total } = await json(`/images?start=${start}&count=${PER_PAGE}`);
      this.start = start;
      element("previous").disabled = start <= 0;
      element("next").disabled = start + PER_PAGE >= total;
      element("range").textContent = `${start + 1} to ${start + images.length} of ${total.toLocaleString("en")}`;
      element("thumbnails").replaceChildren(...images.map((image) => this.button(image)));
    } catch (error) {
      this.onError(error);
    }
  }

  button(image) {
    const button = document.createElement("button"), picture = document.createElement("img");
    button.type = "button";
    button.title = image.file_name;
    button.dataset.id = image.id;
    picture.loading = "lazy";
    picture.alt = image.file_name;
    picture.src = `/thumbnail?id=${image.id}`;
    button.append(picture);
    button.addEventListener("click", () => {
      this.clear();
      button.classList.add("chosen");
      this.onChoose(image);
    });
    return button;
  }

  clear() {
    for (const one of element("thumbnails").children) one.classList.remove("chosen");
  }
}
