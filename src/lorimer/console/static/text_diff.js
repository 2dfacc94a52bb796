// Differences between two texts, by words: the shortest edit script of Myers, bounded, so that texts with little in
// common end quickly as one removal and one addition.

const MAX_EDITS = 1000;
const WORD = /\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu;

/** Return the pieces of both texts in order: `{kind: "same" | "removed" | "added", text}`. */
export function diffTexts(before, after) {
  const [a, b] = [before.match(WORD) || [], after.match(WORD) || []];
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end += 1;
  const middle = edits(a.slice(start, a.length - end), b.slice(start, b.length - end));
  return joined([
    ...a.slice(0, start).map((text) => ({ kind: "same", text })),
    ...middle,
    ...a.slice(a.length - end).map((text) => ({ kind: "same", text })),
  ]);
}

/** Return the shortest script that makes `b` of `a`, or, if it is too long, all of `a` removed and all of `b` added. */
function edits(a, b) {
  const max = Math.min(a.length + b.length, MAX_EDITS);
  const reach = new Int32Array(2 * max + 3).fill(-1); // furthest place in `a` on each diagonal, which begin at -max - 1
  const at = (k) => reach[k + max + 1];
  const past = [];
  reach[max + 2] = 0;
  for (let depth = 0; depth <= max; depth += 1) {
    past.push(reach.slice(max - depth, max + depth + 3));
    for (let k = -depth; k <= depth; k += 2) {
      let x = goesDown(k, depth, at) ? at(k + 1) : at(k - 1) + 1;
      while (x < a.length && x - k < b.length && a[x] === b[x - k]) x += 1;
      reach[k + max + 1] = x;
      if (x >= a.length && x - k >= b.length) return path(a, b, past, depth, k);
    }
  }
  return [...a.map((text) => ({ kind: "removed", text })), ...b.map((text) => ({ kind: "added", text }))];
}

/** Return whether the furthest path to a diagonal ends with an addition. */
const goesDown = (k, depth, at) => k === -depth || (k !== depth && at(k - 1) < at(k + 1));

function path(a, b, past, lastDepth, lastK) {
  const found = [];
  let [x, k] = [a.length, lastK];
  for (let depth = lastDepth; depth >= 0; depth -= 1) {
    const at = (diagonal) => past[depth][diagonal + depth + 1];
    const isDown = goesDown(k, depth, at);
    const [fromK, fromX] = isDown ? [k + 1, at(k + 1)] : [k - 1, at(k - 1)];
    const begin = isDown ? fromX : fromX + 1;
    while (x > begin) {
      x -= 1;
      found.push({ kind: "same", text: a[x] });
    }
    if (depth === 0) break;
    found.push(isDown ? { kind: "added", text: b[fromX - fromK] } : { kind: "removed", text: a[fromX] });
    [x, k] = [fromX, fromK];
  }
  return found.reverse();
}

/** Join neighbours of the same kind. */
function joined(pieces) {
  const found = [];
  for (const piece of pieces) {
    if (found.at(-1)?.kind === piece.kind) found.at(-1).text += piece.text;
    else found.push({ ...piece });
  }
  return found;
}
