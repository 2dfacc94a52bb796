// The controls above the charts of a run: filter, axes, smoothing, runs to compare with, what is drawn, and CSV.

import { get } from "./api.js";
import { button, choice, h, replace, searchBox } from "./dom.js";

export const AXES = [
  ["step", "step"],
  ["elapsed", "time since start"],
  ["clock", "time of day"],
];
const LEGENDS = [
  ["name", "names"],
  ["fields", "differences"],
];
const TYPING_MS = 200;

/** Build the controls; those that need several runs are in `curves.compareControls`. */
export function curveControls(curves) {
  const { axis, isLog } = curves.options;
  const filter = searchBox("Filter metrics by name", "Filter metrics", curves.filter, (text) => {
    curves.filter = text;
    curves.setQuery({ metric: text });
    curves.draw(new Set());
  });
  const select = choice("Horizontal axis", AXES, axis, (value) =>
    curves.choose({ axis: value }, { x: value === "step" ? null : value }),
  );
  const legend = choice("Legend", LEGENDS, curves.legendBy, (value) => {
    curves.legendBy = value;
    curves.setQuery({ legend: value === "name" ? null : value });
    curves.draw(null);
  });
  curves.compareControls = h(
    "span",
    { class: "row", hidden: true },
    legend,
    check("mean over seeds", curves.isGrouped, "Draw runs that differ only in their seed as mean ± deviation", (isOn) =>
      curves.group(isOn),
    ),
  );
  return h(
    "div",
    { class: "row chart-controls" },
    filter,
    h("label", { class: "check" }, h("span", { class: "muted" }, "x"), select),
    check("log scale", isLog, null, (isOn) => curves.choose({ isLog: isOn }, { log: isOn ? "1" : null })),
    smoothing(curves),
    check("marks", curves.hasMarks, "Mark checkpoints and where the run was resumed", (isOn) => curves.setHasMarks(isOn)),
    check("constants", curves.hasConstants, "Draw metrics that never change as charts too", (isOn) =>
      curves.setHasConstants(isOn),
    ),
    adding(curves),
    curves.compareControls,
    button("CSV", (event) => curves.saveCsv(event.currentTarget), {
      class: "quiet small",
      title: "Download all values of the runs shown",
    }),
  );
}

function check(label, isOn, title, onChange) {
  const box = h("input", { type: "checkbox", checked: isOn, onchange: () => onChange(box.checked) });
  return h("label", { class: "check", title }, box, label);
}

function smoothing(curves) {
  const { smoothing: weight } = curves.options;
  const amount = h("output", { class: "muted" }, weight.toFixed(2));
  const slider = h("input", {
    type: "range",
    min: "0",
    max: "0.99",
    step: "0.01",
    value: String(weight),
    "aria-label": "Smoothing",
    oninput: () => {
      amount.textContent = Number(slider.value).toFixed(2);
      curves.choose({ smoothing: Number(slider.value) }, { smooth: Number(slider.value) ? slider.value : null });
    },
  });
  return h("label", { class: "check" }, h("span", { class: "muted" }, "smoothing"), slider, amount);
}

/** Build a field that finds runs as one types, by name or any other text of them. */
function adding(curves) {
  const input = h("input", {
    placeholder: "Compare with a run",
    "aria-label": "Compare with another run, by its name or id",
    size: "18",
    autocomplete: "off",
  });
  const found = h("ul", { class: "found-runs", hidden: true });
  const pick = (runId) => {
    curves.addRun(runId);
    input.value = "";
    found.hidden = true;
  };
  const look = async () => {
    const q = input.value.trim();
    const { runs } = q ? await get("/api/v1/runs", { q, limit: 8 }, curves.signal) : { runs: [] };
    if (q !== input.value.trim()) return;
    const others = runs.filter((run) => !curves.runs.some((one) => one.runId === run.run_id));
    replace(
      found,
      others.map((run) => h("li", null, button(run.name, () => pick(run.run_id), { class: "quiet", title: run.run_id }))),
    );
    found.hidden = !others.length;
  };
  let typing;
  input.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => look().catch(() => (found.hidden = true)), TYPING_MS);
  });
  const add = async (event) => {
    event.preventDefault();
    const text = input.value.trim();
    clearTimeout(typing);
    await look().catch(() => {});
    pick(text.includes(":train:") ? text : (found.querySelector("button")?.title ?? text));
  };
  return h(
    "form",
    { class: "adding", onsubmit: add },
    input,
    h("button", { type: "submit", class: "small" }, "Add"),
    found,
  );
}
