const chips = all(".chip");
for (const chip of chips) {
  chip.addEventListener("click", () => {
    const kind = chip.dataset.kind;
    for (const other of chips) other.setAttribute("aria-pressed", String(other === chip));
    for (const row of all("#problem-table tbody tr")) row.hidden = Boolean(kind) && row.dataset.kind !== kind;
    for (const figure of all("#problem-gallery figure"))
      figure.hidden = Boolean(kind) && !figure.dataset.kinds.split(" ").includes(kind);
  });
}

for (const box of all(".class-search")) {
  box.addEventListener("input", () => {
    const query = box.value.trim().toLowerCase();
    for (const item of all(".classes li", box.closest("section"))) item.hidden = !item.dataset.name.includes(query);
  });
}

const tabs = all("[role=tab]");
const select = (chosen) => {
  for (const tab of tabs) {
    const isChosen = tab === chosen;
    tab.setAttribute("aria-selected", String(isChosen));
    tab.tabIndex = isChosen ? 0 : -1;
    document.getElementById(tab.getAttribute("aria-controls")).hidden = !isChosen;
  }
};
if (tabs.length) {
  document.body.classList.add("with-tabs");
  select(tabs[0]);
}
tabs.forEach((tab, index) => {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(index + step + tabs.length) % tabs.length];
    select(next);
    next.focus();
  });
});
