// Downsamples long series as the server does. Buckets have 2^n steps and start at multiples of that; each keeps its
// first, last, minimum, maximum and first non-finite point.

const POINTS_PER_BUCKET = 5;

/** Points of one series, `step → [time, value]`; `stepsPerBucket` is 1 while the series is complete. */
export class Points {
  constructor() {
    this.at = new Map();
    this.stepsPerBucket = 1;
  }

  /** Add points of a response, overwriting existing ones. Above twice `maxPoints`, downsample to `maxPoints`. */
  add(points, stepsPerBucket, maxPoints) {
    if (stepsPerBucket > 1) this.forget(points, stepsPerBucket);
    for (const [step, time, value] of points) this.at.set(step, [time, value]);
    this.stepsPerBucket = Math.max(this.stepsPerBucket, stepsPerBucket);
    if (this.at.size > 2 * maxPoints) this.thin(maxPoints);
  }

  /** Delete stale points: those between the first and the last point of a bucket that was overwritten. */
  forget(points, stepsPerBucket) {
    const spans = new Map();
    for (const [step] of points) {
      const bucket = Math.floor(step / stepsPerBucket);
      spans.set(bucket, [spans.get(bucket)?.[0] ?? step, step]);
    }
    for (const step of this.at.keys()) {
      const span = spans.get(Math.floor(step / stepsPerBucket));
      if (span && span[0] < step && step < span[1]) this.at.delete(step);
    }
  }

  /** Return the first and last point of each bucket by step: an unbiased sample for averaging. */
  sample() {
    const points = [...this.at].sort((a, b) => a[0] - b[0]);
    if (this.stepsPerBucket === 1) return points;
    const bucket = (i) => points[i] && Math.floor(points[i][0] / this.stepsPerBucket);
    return points.filter((_, i) => bucket(i) !== bucket(i - 1) || bucket(i) !== bucket(i + 1));
  }

  thin(maxPoints) {
    const steps = [...this.at.keys()].sort((a, b) => a - b);
    let width = 1;
    let buckets = null;
    while (!buckets || buckets.size * POINTS_PER_BUCKET > maxPoints) {
      width *= 2;
      buckets = Map.groupBy(steps, (step) => Math.floor(step / width));
    }
    this.at = new Map(
      [...buckets.values()].flatMap((bucket) => this.kept(bucket)).map((step) => [step, this.at.get(step)]),
    );
    this.stepsPerBucket = Math.max(this.stepsPerBucket, width);
  }

  /** Return the steps of a bucket to keep, in order. */
  kept(steps) {
    const value = (step) => this.at.get(step)[1];
    const finite = steps.filter((step) => value(step) !== null);
    const best = (isBetter) => finite.reduce((a, b) => (isBetter(value(b), value(a)) ? b : a), finite[0]);
    const chosen = [steps[0], steps.at(-1), best((a, b) => a < b), best((a, b) => a > b)];
    chosen.push(steps.find((step) => value(step) === null));
    return [...new Set(chosen)].filter((step) => step !== undefined).sort((a, b) => a - b);
  }
}
