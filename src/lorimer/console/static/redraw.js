// Redraws lists without losing the keyboard focus.

import { replace } from "./dom.js";

const FOCUSABLE = "a[href], button, input, select, textarea, [tabindex]";

const ROW = "[data-row], [data-checkpoint]";
const keyOf = (row) => row.dataset.row || row.dataset.checkpoint;

/** Replace a node's children and restore the focus in the row with the same `data-row` or checkpoint. */
export function redraw(node, ...children) {
  const focused = document.activeElement;
  const row = node.contains(focused) ? focused.closest(ROW) : null;
  const key = row && keyOf(row);
  const index = row ? [...row.querySelectorAll(FOCUSABLE)].indexOf(focused) : -1;
  replace(node, ...children);
  if (index < 0) return;
  const again = [...node.querySelectorAll(ROW)].find((one) => keyOf(one) === key);
  again?.querySelectorAll(FOCUSABLE)[index]?.focus({ preventScroll: true });
}

/** Redraw only on change: call `draw(value)` unless the value serialises like the last one. */
export function whenChanged(draw) {
  let last;
  return (value) => {
    const text = JSON.stringify(value);
    if (text === last) return;
    last = text;
    draw(value);
  };
}
