// The buttons of a chart: pin it, show it on the whole screen, and export what it shows.

import { button, h, toast } from "./dom.js";
import { csvText, fileName, png, svgText } from "./chart_export.js";
import { save } from "./files.js";

/** Build the buttons of a chart; `onPin()` is called with a click on the pin, if there is one. */
export function chartTools(chart, onPin = null) {
  const pin = onPin && button("☆", onPin, { class: "quiet small pin", "aria-pressed": "false" });
  if (pin) {
    chart.setPinned = (isPinned) => {
      pin.textContent = isPinned ? "★" : "☆";
      pin.setAttribute("aria-pressed", String(isPinned));
      pin.title = isPinned ? "Unpin" : "Pin to the top";
      pin.setAttribute("aria-label", `${pin.title}: ${chart.name}`);
    };
    chart.setPinned(false);
  }
  return h("span", { class: "chart-tools" }, pin, exporting(chart), expanding(chart));
}

function exporting(chart) {
  const act = (work) => async () => {
    menu.open = false;
    if (!chart.plot) return;
    try {
      await work();
    } catch (error) {
      toast(error.message, "bad");
    }
  };
  const items = [
    ["PNG", async () => save(await png(chart), fileName(chart, "png"))],
    ["SVG", () => save(new Blob([svgText(chart)], { type: "image/svg+xml" }), fileName(chart, "svg"))],
    ["CSV", () => save(new Blob([csvText(chart)], { type: "text/csv" }), fileName(chart, "csv"))],
  ];
  const menu = h(
    "details",
    { class: "chart-menu" },
    h("summary", { title: "Export what is shown", "aria-label": `Export ${chart.name}` }, "⤓"),
    h(
      "div",
      null,
      items.map(([label, work]) => button(label, act(work), { class: "quiet small" })),
    ),
  );
  menu.addEventListener("focusout", (event) => {
    if (!menu.contains(event.relatedTarget)) menu.open = false;
  });
  return menu;
}

function expanding(chart) {
  const onKey = (event) => event.key === "Escape" && set(false);
  const set = (isExpanded) => {
    chart.isExpanded = isExpanded;
    chart.element.classList.toggle("expanded", isExpanded);
    document.body.classList.toggle("has-expanded", isExpanded);
    document[isExpanded ? "addEventListener" : "removeEventListener"]("keydown", onKey);
    label();
    chart.fit();
  };
  const node = button("⤢", () => set(!chart.isExpanded), { class: "quiet small expand" });
  const label = () => {
    node.textContent = chart.isExpanded ? "✕" : "⤢";
    node.title = chart.isExpanded ? "Close (Esc)" : "Full screen";
    node.setAttribute("aria-label", `${chart.isExpanded ? "Close" : "Full screen"}: ${chart.name}`);
  };
  label();
  return node;
}
