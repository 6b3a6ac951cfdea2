// An image with its detections on a canvas.

const SMALLEST_PX = 640, LARGEST_PX = 4096; // longer side of the drawing
const FILL = 115; // opacity of a mask inside its outline, of 255

export class Picture {
  constructor(canvas, image, answer, classes) {
    this.canvas = canvas;
    this.image = image;
    this.answer = answer;
    const longer = Math.max(answer.width, answer.height);
    this.scale = longer < SMALLEST_PX ? Math.ceil(SMALLEST_PX / longer) : Math.min(1, LARGEST_PX / longer);
    canvas.width = Math.max(1, Math.round(answer.width * this.scale));
    canvas.height = Math.max(1, Math.round(answer.height * this.scale));
    this.detections = answer.detections.map((one) => ({ ...one, class: classes.get(one.category_id) }));
    this.shown = [];
    this.marked = null;
  }

  // Draw the detections that `view` selects: {score, hidden, boxes, masks, labels}; `marked` is under the pointer.
  draw(view, marked = null) {
    this.marked = marked;
    const pen = this.canvas.getContext("2d");
    pen.imageSmoothingEnabled = this.scale <= 1;
    pen.drawImage(this.image, 0, 0, this.canvas.width, this.canvas.height);
    this.shown = this.detections.filter((one) => one.score > view.score && !view.hidden.has(one.category_id));
    const bySize = [...this.shown].sort((a, b) => b.bbox[2] * b.bbox[3] - a.bbox[2] * a.bbox[3]);
    if (view.masks) for (const one of bySize) this.drawMask(pen, one, one === marked);
    const byScore = [...this.shown].reverse();
    const line = Math.max(1, Math.sqrt(this.canvas.width * this.canvas.height) / 300);
    if (view.boxes) for (const one of byScore) this.drawBox(pen, one, one === marked ? 2 * line : line);
    if (view.labels) for (const one of byScore) this.drawLabel(pen, one);
    if (marked && view.labels && this.shown.includes(marked)) this.drawLabel(pen, marked);
  }

  // The smallest detection at a point of the image, by its mask if it has one.
  at(x, y) {
    const hit = this.shown.filter((one) => contains(one.bbox, x, y) && (!maskOf(one) || maskAt(maskOf(one), x, y)));
    const found = hit.length ? hit : this.shown.filter((one) => contains(one.bbox, x, y));
    return found.sort((a, b) => a.bbox[2] * a.bbox[3] - b.bbox[2] * b.bbox[3])[0] ?? null;
  }

  drawMask(pen, one, strong) {
    const mask = maskOf(one);
    if (!mask || !mask.width) return;
    one.tinted ??= tinted(mask, one.class.color);
    const area = [mask.x, mask.y, mask.width, mask.height].map((side) => side * this.scale);
    for (let times = strong ? 2 : 1; times > 0; times--) pen.drawImage(one.tinted, ...area);
  }

  drawBox(pen, one, line) {
    pen.strokeStyle = one.class.color;
    pen.lineWidth = line;
    pen.strokeRect(...one.bbox.map((side) => side * this.scale));
  }

  drawLabel(pen, one) {
    const size = Math.max(11, Math.sqrt(this.canvas.width * this.canvas.height) / 48), pad = size * 0.3;
    const text = `${one.class.label} ${one.score.toFixed(2)}`;
    pen.font = `600 ${size}px system-ui, sans-serif`;
    const width = pen.measureText(text).width + 2 * pad, height = size + 2 * pad;
    const x = Math.max(0, Math.min(one.bbox[0] * this.scale, this.canvas.width - width));
    const y = Math.max(0, one.bbox[1] * this.scale - height);
    pen.fillStyle = one.class.color;
    pen.fillRect(x, y, width, height);
    pen.fillStyle = ink(one.class.color);
    pen.textBaseline = "middle";
    pen.fillText(text, x + pad, y + height / 2);
  }
}

const contains = ([left, top, width, height], x, y) =>
  x >= left && y >= top && x <= left + width && y <= top + height;

const maskAt = (mask, x, y) => {
  const column = Math.floor(x) - mask.x, row = Math.floor(y) - mask.y;
  return column >= 0 && row >= 0 && column < mask.width && row < mask.height && mask.pixels[row * mask.width + column];
};

function maskOf(one) {
  if (one.mask === undefined) one.mask = one.segmentation ? maskFromRuns(one.segmentation) : null;
  return one.mask;
}

// COCO's compressed run lengths: six bits per character, and from the fourth run on differences from the run two before.
export function runsOf(text) {
  const runs = [];
  for (let at = 0; at < text.length;) {
    let value = 0, factor = 1, code;
    do {
      code = text.charCodeAt(at++) - 48;
      value += (code & 31) * factor;
      factor *= 32;
    } while (code & 32);
    if (code & 16) value -= factor;
    runs.push(runs.length > 2 ? value + runs[runs.length - 2] : value);
  }
  return runs;
}

// The part of a mask that is not empty: {x, y, width, height, pixels}. Runs go down the columns and begin with zeros.
export function maskFromRuns({ size: [height], counts }) {
  const spans = [];
  let at = 0, left = Infinity, top = Infinity, right = -1, bottom = -1;
  runsOf(counts).forEach((run, index) => {
    if (index % 2 && run) {
      const first = Math.floor(at / height), last = Math.floor((at + run - 1) / height);
      for (let x = first; x <= last; x++) {
        const y0 = Math.max(at - x * height, 0), y1 = Math.min(at + run - x * height, height);
        spans.push([x, y0, y1]);
        top = Math.min(top, y0);
        bottom = Math.max(bottom, y1 - 1);
      }
      left = Math.min(left, first);
      right = Math.max(right, last);
    }
    at += run;
  });
  if (right < 0) return { x: 0, y: 0, width: 0, height: 0, pixels: new Uint8Array(0) };
  const mask = { x: left, y: top, width: right - left + 1, height: bottom - top + 1 };
  mask.pixels = new Uint8Array(mask.width * mask.height);
  for (const [x, y0, y1] of spans) {
    for (let y = y0; y < y1; y++) mask.pixels[(y - top) * mask.width + x - left] = 1;
  }
  return mask;
}

function tinted(mask, color) {
  const canvas = document.createElement("canvas");
  canvas.width = mask.width;
  canvas.height = mask.height;
  const pen = canvas.getContext("2d"), data = pen.createImageData(mask.width, mask.height);
  const [red, green, blue] = rgb(color), { width, height, pixels } = mask;
  const words = new Uint32Array(data.data.buffer), word = (blue << 16) | (green << 8) | red; // RGBA, little-endian
  const edge = ((255 << 24) | word) >>> 0, inner = ((FILL << 24) | word) >>> 0;
  for (let y = 0, at = 0; y < height; y++) {
    for (let x = 0; x < width; x++, at++) {
      if (!pixels[at]) continue;
      const isInner = x > 0 && y > 0 && x < width - 1 && y < height - 1
        && pixels[at - 1] && pixels[at + 1] && pixels[at - width] && pixels[at + width];
      words[at] = isInner ? inner : edge;
    }
  }
  pen.putImageData(data, 0, 0);
  return canvas;
}

const rgb = (color) => [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
const ink = (color) => {
  const [red, green, blue] = rgb(color);
  return 0.299 * red + 0.587 * green + 0.114 * blue > 110 ? "#000" : "#fff";
};
