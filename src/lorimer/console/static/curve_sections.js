// The sections of a run's charts: pinned charts, one section per prefix, and a table of constants. Sections fold. Folds
// and pins are in the URL once they are changed, and remembered for all runs of the same kind.

import { h, replace, short, table } from "./dom.js";
import { remember, remembered, sections } from "./metric_sections.js";

const PINNED = "pinned";
const CONSTANTS = "constants";

export class CurveSections {
  constructor(query, setQuery, onChange) {
    Object.assign(this, { setQuery, onChange });
    this.element = h("div", { class: "chart-sections" });
    this.parts = new Map();
    this.kind = null;
    /** Given in the URL, or null: then what is remembered of the kind counts. */
    this.given = Object.fromEntries(
      ["fold", "pin"].map((name) => [name, query.has(name) ? query.get(name).split(",").filter(Boolean) : null]),
    );
    this.constants = h("div");
  }

  /** Take over what is remembered of a kind of runs. */
  setKind(kind) {
    if (kind === this.kind) return;
    this.kind = kind;
    this.folds = new Set(this.given.fold ?? [CONSTANTS, ...remembered("folds", kind)].filter(unlessOpened(kind)));
    this.pins = new Set(this.given.pin ?? remembered("pins", kind));
    for (const [name, part] of this.parts) part.element.open = !this.folds.has(name);
  }

  /** Pin a chart to the top, or unpin it. */
  togglePin(name) {
    if (!this.pins.delete(name)) this.pins.add(name);
    remember("pins", this.kind, [...this.pins]);
    this.given.pin = [...this.pins];
    this.setQuery({ pin: this.given.pin.join(",") || null });
    this.onChange();
  }

  /** Show charts by name in their sections, and the constants `[{name, values}]` below them. */
  draw(charts, constants, labels) {
    const pinned = [...this.pins].filter((name) => charts.has(name));
    const others = [...charts.keys()].filter((name) => !this.pins.has(name));
    const shown = [...(pinned.length ? [[PINNED, pinned]] : []), ...sections(others, this.kind)];
    const wanted = shown.map(([section, names]) => this.fill(section, names, charts));
    if (constants.length) wanted.push(this.fillConstants(constants, labels));
    const here = this.element.children;
    if (wanted.length !== here.length || wanted.some((node, i) => node !== here[i]))
      this.element.replaceChildren(...wanted);
    for (const [name, chart] of charts) chart.setPinned(this.pins.has(name));
  }

  /** Put charts into a section. Move them only if their set changed: moving a chart would end a drag in it. */
  fill(section, names, charts) {
    const part = this.part(section);
    const wanted = names.map((name) => charts.get(name).element);
    const numShown = wanted.filter((node) => !node.hidden).length;
    if (wanted.length !== part.grid.childElementCount || wanted.some((node, i) => node !== part.grid.children[i]))
      part.grid.replaceChildren(...wanted);
    part.count.textContent = `${short(numShown)} ${numShown === 1 ? "chart" : "charts"}`;
    part.element.hidden = !numShown;
    return part.element;
  }

  fillConstants(constants, labels) {
    const part = this.part(CONSTANTS);
    const key = JSON.stringify([constants, labels]);
    if (key !== this.drawnConstants) {
      this.drawnConstants = key;
      const column = (label, n) => ({ label, number: true, value: ({ values }) => short(values[n]) });
      const columns = labels.length > 1 ? labels.map(column) : [column("Value", 0)];
      const rows = [{ label: "Metric", wide: true, value: ({ name }) => name }, ...columns];
      replace(
        part.grid,
        table(rows, constants, ({ name }) => ({ "data-constant": name })),
      );
    }
    part.count.textContent = `${short(constants.length)} ${constants.length === 1 ? "metric" : "metrics"}`;
    part.element.hidden = false;
    return part.element;
  }

  part(section) {
    if (!this.parts.has(section)) this.parts.set(section, this.newPart(section));
    return this.parts.get(section);
  }

  newPart(section) {
    const grid = h("div", { class: section === CONSTANTS ? "constants" : "charts" });
    const count = h("small", { class: "muted" });
    const title = section || "general";
    const element = h(
      "details",
      { class: "chart-section", "data-section": title, open: !this.folds.has(section) },
      h("summary", null, h("b", null, title), " ", count),
      grid,
    );
    element.addEventListener("toggle", () => this.keepFold(section, !element.open));
    return { element, grid, count };
  }

  keepFold(section, isFolded) {
    if (this.folds.has(section) === isFolded) return;
    if (isFolded) this.folds.add(section);
    else this.folds.delete(section);
    remember("folds", this.kind, [...this.folds].filter((name) => name !== CONSTANTS));
    remember("opened", this.kind, this.folds.has(CONSTANTS) ? [] : [CONSTANTS]);
    this.given.fold = [...this.folds];
    this.setQuery({ fold: this.given.fold.join(",") || "none" });
  }
}

const unlessOpened = (kind) => (name) => name !== CONSTANTS || !remembered("opened", kind).includes(CONSTANTS);
