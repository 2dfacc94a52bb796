// The conversation of the playground as a tree: a fork has alternative turns, a turn has batches of answers, an answer
// leads to the next fork. Edits and repeated requests add branches and never replace one. Does not draw anything.

/** A place where a turn follows; `shown` is the alternative on the path. */
export const newFork = () => ({ turns: [], shown: 0 });

/** One answer, and the part of it received so far; `side` is the position of its model. */
export const newAnswer = (model, side) => ({
  model,
  side,
  text: "",
  reasoning: "",
  tokens: [],
  numPrompt: 0,
  finish: null,
  usage: null,
  error: null,
  state: "running",
  beganAt: performance.now(),
  firstAt: null,
  lastAt: null,
  numFirst: 0,
  next: newFork(),
});

/** Return the turns shown, first to last: `{fork, turn, batch, answer}`, where the chosen answer leads to the next. */
export function pathOf(root) {
  const path = [];
  for (let fork = root; fork.turns.length; fork = path.at(-1).answer.next) {
    const turn = fork.turns[fork.shown];
    const batch = turn.batches[turn.shown];
    path.push({ fork, turn, batch, answer: batch.answers[batch.chosen] });
  }
  return path;
}

/** Add a turn to a fork and show it. */
export function addTurn(fork, prompt, images, answers) {
  const turn = { prompt, images, batches: [{ answers, chosen: 0 }], shown: 0 };
  fork.turns.push(turn);
  fork.shown = fork.turns.length - 1;
  return turn;
}

/** Add answers to a turn and show them; the earlier ones stay reachable. */
export function addBatch(turn, answers) {
  turn.batches.push({ answers, chosen: 0 });
  turn.shown = turn.batches.length - 1;
}

/** Return whether an answer can be a part of a history. */
export const isUsable = (answer) => answer.state !== "failed" && answer.text !== "";

/** Let the first usable answer of a batch lead on if the chosen one has failed. */
export function chooseUsable(batch) {
  const usable = batch.answers.findIndex(isUsable);
  if (!isUsable(batch.answers[batch.chosen]) && usable >= 0) batch.chosen = usable;
}

/** Return the messages of a request for answers to `turn`: the path before it, without failed turns, and the turn. */
export function messagesTo(root, turn, system) {
  const path = pathOf(root);
  const before = path.slice(0, path.findIndex((step) => step.turn === turn)).filter((step) => isUsable(step.answer));
  return [
    ...(system.trim() ? [{ role: "system", content: system }] : []),
    ...before.flatMap((step) => [userMessage(step.turn), { role: "assistant", content: step.answer.text }]),
    userMessage(turn),
  ];
}

function userMessage({ prompt, images }) {
  if (!images.length) return { role: "user", content: prompt };
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role: "user", content: [...parts, { type: "text", text: prompt }] };
}
