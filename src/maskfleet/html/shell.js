const all = (selector, root = document) => [...root.querySelectorAll(selector)];

// Images enlarge on a click.
const viewer = document.getElementById("viewer");
for (const button of all(".open")) {
  button.addEventListener("click", () => {
    const image = button.querySelector("img");
    viewer.querySelector("img").src = image.src;
    viewer.querySelector("img").alt = image.alt;
    viewer.querySelector("p").textContent = image.alt;
    viewer.showModal();
  });
}
document.getElementById("close").addEventListener("click", () => viewer.close());
viewer.addEventListener("click", (event) => { if (event.target === viewer) viewer.close(); });

// Line charts show the values under the pointer; legend entries hide and show their lines.
const nearest = (values, x) =>
  values.reduce((best, value, i) => (Math.abs(value - x) < Math.abs(values[best] - x) ? i : best), 0);
for (const figure of all(".line-chart")) {
  const data = JSON.parse(figure.dataset.chart), svg = figure.querySelector("svg");
  const cursor = figure.querySelector(".cursor"), tip = figure.querySelector(".tip"), hidden = new Set();
  for (const button of all(".legend button", figure)) {
    button.addEventListener("click", () => {
      const series = Number(button.dataset.series), off = !hidden.delete(series);
      if (off) hidden.add(series);
      button.classList.toggle("off", off);
      svg.querySelector(`g[data-series="${series}"]`).classList.toggle("off", off);
    });
  }
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * data.width;
    const lines = data.lines.filter((line) => !hidden.has(line.series));
    if (!lines.length) return;
    const first = nearest(lines[0].x, x), at = lines[0].x[first];
    tip.replaceChildren(`${data.x_label} ${lines[0].at[first].toLocaleString("en")}`);
    for (const line of lines) {
      const row = document.createElement("div"), mark = document.createElement("i"), value = document.createElement("b");
      mark.style.background = `var(--line-${line.color})`;
      value.textContent = line.text[nearest(line.x, at)];
      row.append(value, mark, line.name);
      tip.append(row);
    }
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    cursor.setAttribute("visibility", "visible");
    tip.hidden = false;
    const left = (at / data.width) * box.width;
    tip.style.left = `${left > box.width / 2 ? left - tip.offsetWidth - 12 : left + 12}px`;
  });
  svg.addEventListener("pointerleave", () => {
    tip.hidden = true;
    cursor.setAttribute("visibility", "hidden");
  });
}

addEventListener("beforeprint", () => all("details").forEach((one) => { one.open = true; }));
