// Stacked bars over time, for amounts per hour or day. Redrawn when the width changes.

import { h, replace, svg } from "./dom.js";

const HEIGHT = 220;
const MARGIN = { top: 8, right: 4, bottom: 22, left: 46 };
const MIN_LABEL_WIDTH = 64; // pixels for the label of a bar

/** Draw a figure called `name` of `series: [{name, values}]`, with a value for each of `labels: [{short, long}]`. */
export function stackedBars({ name, labels, series }) {
  const holder = h("div", { class: "bars" });
  const draw = () => holder.clientWidth && replace(holder, picture(holder.clientWidth, name, labels, series));
  new ResizeObserver(draw).observe(holder);
  const legend = series.map(({ name: label }, i) => h("span", { class: `bars-key s${i % 8}` }, label));
  return h("figure", { class: "bars-figure" }, holder, h("figcaption", { class: "row" }, legend));
}

function picture(width, name, labels, series) {
  const totals = labels.map((_, i) => series.reduce((sum, { values }) => sum + values[i], 0));
  const step = niceStep(Math.max(...totals, 1) / 4);
  const max = Math.ceil(Math.max(...totals, 1) / step) * step;
  const y = (value) => HEIGHT - MARGIN.bottom - (value / max) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  const slot = (width - MARGIN.left - MARGIN.right) / labels.length;
  const every = Math.ceil(MIN_LABEL_WIDTH / slot);
  const ticks = Array.from({ length: Math.round(max / step) + 1 }, (_, i) => i * step);
  return svg(
    "svg",
    {
      viewBox: `0 0 ${width} ${HEIGHT}`,
      width,
      height: HEIGHT,
      role: "img",
      "aria-label": `${name}; the tables below have the numbers`,
    },
    ticks.map((value) => [
      svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }),
      svg("text", { class: "tick", x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end" }, tick(value)),
    ]),
    labels.map((label, i) => {
      const x = MARGIN.left + i * slot;
      let below = 0;
      const said = [`${label.long}: ${totals[i].toLocaleString("en")} tokens`];
      const parts = series.map(({ name: part, values }, number) => {
        if (!values[i]) return null;
        const bottom = y(below);
        below += values[i];
        said.push(`${part}: ${values[i].toLocaleString("en")}`);
        return svg("rect", {
          class: `s${number % 8}`,
          x: x + slot * 0.12,
          width: slot * 0.76,
          y: y(below),
          height: bottom - y(below),
        });
      });
      return svg(
        "g",
        { class: "bar" },
        svg("title", null, said.join("\n")),
        svg("rect", { class: "hit", x, width: slot, y: MARGIN.top, height: HEIGHT - MARGIN.top - MARGIN.bottom }),
        parts,
        i % every === 0 &&
          svg("text", { class: "tick", x: x + slot / 2, y: HEIGHT - 6, "text-anchor": "middle" }, label.short),
      );
    }),
  );
}

/** Return 1, 2 or 5 times a power of ten: an integer that is at least `min`. */
function niceStep(min) {
  const power = 10 ** Math.floor(Math.log10(Math.max(min, 1)));
  return power * ([1, 2, 5].find((factor) => factor * power >= min) || 10);
}

/** Format a round number in few characters. */
function tick(value) {
  for (const [size, letter] of [
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ])
    if (value >= size) return `${value / size}${letter}`;
  return String(value);
}
