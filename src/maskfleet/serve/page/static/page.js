// What the controls of the page do.

import { ask, detect, detectImage, json } from "/api.js";
import { Camera } from "/camera.js";
import { Gallery } from "/gallery.js";
import { Picture } from "/picture.js";

const element = (id) => document.getElementById(id);
const stage = element("stage"), canvas = element("canvas"), tip = element("tip");
const view = { score: 0.5, hidden: new Set(), boxes: true, masks: true, labels: true };
let model, picture = null, name = "image", gallery = null, running = null;
const classes = new Map(); // by category id

function report(error) {
  element("error").textContent = error ? error.message : "";
  element("error").hidden = !error;
}

// Show what `source` gives: {name, answer: signal -> promise, image: () -> promise of a bitmap}. Returns whether it failed.
async function load(source) {
  running?.abort();
  const own = (running = new AbortController()), began = performance.now();
  report(null);
  stage.classList.add("busy");
  element("status").textContent = "Detecting…";
  try {
    const image = source.image().catch((error) => error); // the server's error says more than the browser's
    const answer = await source.answer(own.signal);
    const bitmap = await image;
    if (running !== own) return false;
    if (bitmap instanceof Error) throw new Error("The browser cannot show this kind of image. Convert it to JPEG or PNG.");
    picture = new Picture(canvas, bitmap, answer, classes);
    name = source.name;
    const seconds = ((performance.now() - began) / 1000).toFixed(2);
    element("status").textContent = `${source.name}: ${answer.width} × ${answer.height} pixels, ${seconds} s`;
    element("hint").hidden = true;
    canvas.hidden = false;
    for (const id of ["save-json", "save-png"]) element(id).disabled = false;
    redraw();
    return false;
  } catch (error) {
    if (running !== own || error.name === "AbortError") return false;
    element("status").textContent = "\u00a0";
    report(error);
    return true;
  } finally {
    if (running === own) stage.classList.remove("busy");
  }
}

function openFile(file) {
  if (!file) return Promise.resolve(false);
  gallery?.clear();
  const limit = model.limits.bytes;
  if (file.size > limit) {
    const sizes = [file.size, limit].map((size) => `${(size / 1e6).toFixed(1)} MB`);
    report(new Error(`${file.name} has ${sizes[0]}; the limit is ${sizes[1]}. Choose a smaller image.`));
    return Promise.resolve(true);
  }
  return load({
    name: file.name || "image",
    answer: (signal) => detect(file, signal),
    image: () => createImageBitmap(file),
  });
}

const openImage = (image) =>
  load({
    name: image.file_name.split("/").pop(),
    answer: (signal) => detectImage(image.id, signal),
    image: async () => createImageBitmap(await (await ask(`/image?id=${image.id}`)).blob()),
  });

function redraw(marked = null) {
  element("score-value").textContent = view.score.toFixed(2);
  if (!picture) return;
  picture.draw(view, marked);
  canvas.setAttribute("aria-label", `${name} with ${picture.shown.length} detections`);
  canvas.dataset.shown = picture.shown.length;
  element("count").textContent = `${picture.shown.length} of ${picture.detections.length} objects are shown`;
  showCounts();
}

function showCounts() {
  const counts = new Map();
  for (const one of picture.detections) {
    if (one.score > view.score) counts.set(one.category_id, (counts.get(one.category_id) ?? 0) + 1);
  }
  for (const [id, one] of classes) {
    one.count.textContent = counts.get(id) ?? "";
    one.row.classList.toggle("absent", !counts.has(id));
  }
  const order = [...classes].sort(([a], [b]) => Boolean(counts.get(b)) - Boolean(counts.get(a)));
  const rows = order.map(([, one]) => one.row), list = element("classes");
  if (rows.some((row, index) => row !== list.children[index])) list.replaceChildren(...rows);
}

function addClass({ id, name: given, color }) {
  const label = /^\d+$/.test(given) ? `class ${given}` : given; // weights without names have numbers
  const row = document.createElement("li"), line = document.createElement("label");
  const [box, mark, text, count] = ["input", "i", "span", "b"].map((tag) => document.createElement(tag));
  box.type = "checkbox";
  box.checked = true;
  box.addEventListener("change", () => {
    if (box.checked) view.hidden.delete(id);
    else view.hidden.add(id);
    redraw();
  });
  mark.style.background = color;
  text.className = "name";
  text.textContent = label;
  line.append(box, mark, text, count);
  row.append(line);
  element("classes").append(row);
  classes.set(id, { label, color, row, box, count });
}

function selectAll(selected) {
  for (const [id, one] of classes) {
    one.box.checked = selected;
    if (selected) view.hidden.delete(id);
    else view.hidden.add(id);
  }
  redraw();
}

function hover(event) {
  if (!picture) return;
  const frame = canvas.getBoundingClientRect(), outer = stage.getBoundingClientRect();
  const x = ((event.clientX - frame.left) / frame.width) * picture.answer.width;
  const y = ((event.clientY - frame.top) / frame.height) * picture.answer.height;
  const one = picture.at(x, y);
  if (one !== picture.marked) redraw(one);
  tip.hidden = !one;
  if (!one) return;
  const [left, top, width, height] = one.bbox.map((side) => Math.round(side));
  tip.textContent = `${one.class.label}, score ${one.score.toFixed(3)}, ${width} × ${height} pixels at ${left}, ${top}`;
  tip.style.left = `${Math.max(0, Math.min(event.clientX - outer.left + 14, outer.width - tip.offsetWidth))}px`;
  tip.style.top = `${Math.max(0, Math.min(event.clientY - outer.top + 14, outer.height - tip.offsetHeight))}px`;
}

function save(blob, suffix) {
  const link = document.createElement("a"), url = URL.createObjectURL(blob);
  link.href = url;
  link.download = `${name.replace(/\.[^.]*$/, "")}${suffix}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

function saveJson() {
  const detections = picture.shown.map(({ class: _, mask: __, tinted: ___, ...one }) => one);
  const { height, width } = picture.answer;
  save(new Blob([JSON.stringify({ height, width, detections }, null, 1)], { type: "application/json" }), ".json");
}

function savePng() {
  redraw();
  canvas.toBlob((blob) => (blob ? save(blob, "-detections.png") : report(new Error("The image is too large for a PNG."))));
}

function connectControls() {
  element("score").addEventListener("input", (event) => {
    view.score = event.target.value / 100;
    redraw();
  });
  for (const part of ["boxes", "masks", "labels"]) {
    element(`show-${part}`).addEventListener("change", (event) => {
      view[part] = event.target.checked;
      redraw();
    });
  }
  element("all-classes").addEventListener("click", () => selectAll(true));
  element("no-classes").addEventListener("click", () => selectAll(false));
  element("save-json").addEventListener("click", saveJson);
  element("save-png").addEventListener("click", savePng);
  canvas.addEventListener("pointermove", hover);
  canvas.addEventListener("pointerleave", () => {
    tip.hidden = true;
    redraw();
  });
}

function connectSources() {
  element("file").addEventListener("change", (event) => {
    openFile(event.target.files[0]);
    event.target.value = ""; // so that the same file can be chosen again
  });
  for (const kind of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(kind, (event) => {
      event.preventDefault();
      stage.classList.toggle("over", kind === "dragover");
      if (kind === "drop") openFile(event.dataTransfer.files[0]);
    });
  }
  document.addEventListener("paste", (event) => openFile(event.clipboardData.files[0]));
  const camera = new Camera({
    video: element("video"),
    live: element("live"),
    onFrame: (blob) => openFile(new File([blob], "camera.jpg", { type: "image/jpeg" })),
  });
  element("open-camera").addEventListener("click", async () => {
    report(null);
    try {
      await camera.open();
      element("camera").hidden = false;
    } catch (error) {
      report(error);
    }
  });
  element("snap").addEventListener("click", () => camera.snap());
  element("stop").addEventListener("click", () => {
    camera.close();
    element("camera").hidden = true;
  });
}

async function start() {
  model = await json("/model");
  element("model").textContent = `${model.source}, ${model.device}`;
  view.score = model.default_score;
  element("score").value = Math.round(100 * model.default_score);
  element("masks-label").hidden = !model.has_masks;
  model.classes.forEach(addClass);
  connectControls();
  connectSources();
  redraw();
  if (model.images?.count) {
    gallery = new Gallery({ onChoose: openImage, onError: report });
    await gallery.show(0);
  }
  document.body.dataset.ready = "true";
}

start().catch(report);
