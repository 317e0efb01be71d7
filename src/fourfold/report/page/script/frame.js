/* The stretch of time that timeline and memory show, and where it lies on them. */

const AXIS_HEIGHT = 34; // pixels
const CLOSEST = 1e-6; // of the step: the smallest stretch that is shown

class Frame {
  /** @param span the step's time. @param unit "s", or that of the times. */
  constructor(span, unit) {
    this.span = span > 0 ? span : 1;
    this.unit = unit;
    this.instants = instantUnit(this.span, unit);
    this.from = 0;
    this.to = this.span;
    this.left = this.right = 0;
    this.listeners = [];
    this.pointer = null; // the time under the pointer, shown by both charts
    this.chosen = null; // the time of what was selected last
  }

  place(left, right) {
    this.left = left;
    this.right = Math.max(right, left + 1);
  }

  x(time) {
    return this.left + ((time - this.from) / (this.to - this.from)) * (this.right - this.left);
  }

  time(x) {
    return this.from + ((x - this.left) / (this.right - this.left)) * (this.to - this.from);
  }

  get whole() {
    return this.from <= 0 && this.to >= this.span;
  }

  /** Shows a stretch, cut to the step. */
  show(from, to) {
    const length = Math.min(Math.max(to - from, this.span * CLOSEST), this.span);
    this.from = Math.min(Math.max(from, 0), this.span - length);
    this.to = this.from + length;
    this.tell("draw");
  }

  /** What is zoomed around: what is under the pointer, else what is selected and seen, else the middle. */
  get centre() {
    const seen = (time) => time !== null && time >= this.from && time <= this.to;
    return [this.pointer, this.chosen].find(seen) ?? (this.from + this.to) / 2;
  }

  /** Shows `factor` times as much time; what is at `time` stays where it is. */
  zoom(factor, time = this.centre) {
    this.show(time - (time - this.from) * factor, time + (this.to - time) * factor);
  }

  /** Moves by a part of what is shown. */
  move(part) {
    const by = part * (this.to - this.from);
    this.show(this.from + by, this.to + by);
  }

  all() {
    this.show(0, this.span);
  }

  /** Moves no more than needed to show a stretch. */
  reveal(from, to) {
    const length = this.to - this.from;
    if (to - from > length || from < this.from) this.show(from - length * 0.1, from + length * 0.9);
    else if (to > this.to) this.show(to - length * 0.9, to + length * 0.1);
  }

  point(time) {
    if (time === this.pointer) return;
    this.pointer = time;
    this.tell("mark");
  }

  tell(what) {
    for (const listener of this.listeners) listener(what);
  }

  words() {
    const text = `${instant(this.from, this.instants)} to ${instant(this.to, this.instants)}`;
    return this.whole ? `whole step: ${quantity(this.span, this.unit)}` : text;
  }

  /** Round instants about `spacing` pixels apart, and how many decimals they need. */
  ticks(spacing) {
    const { scale } = this.instants;
    const least = ((this.to - this.from) / scale / Math.max(this.right - this.left, 1)) * spacing;
    const step = roundStep(least);
    const times = [];
    for (let i = Math.ceil(this.from / scale / step - 1e-9); i * step * scale <= this.to * (1 + 1e-12); i++) {
      times.push(i * step * scale);
    }
    return { times, decimals: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
  }

  /** The axis, its labels' middle at `y`, and lines through the chart from `top` to `bottom`. */
  drawAxis(context, y, top, bottom) {
    const { times, decimals } = this.ticks(130);
    const { name, scale } = this.instants;
    context.font = font(textSize(0.9));
    context.textBaseline = "middle";
    context.textAlign = "center";
    context.fillStyle = theme.colour("faint");
    for (const time of times) context.fillRect(Math.round(this.x(time)), top, 1, bottom - top);
    context.fillStyle = theme.colour("quiet");
    for (const time of times) {
      const text = `${number(time / scale, decimals)}`;
      const half = context.measureText(text).width / 2;
      context.fillText(text, Math.min(Math.max(this.x(time), this.left + half), this.right - half), y);
    }
    context.textAlign = "right";
    context.fillText(`time, ${name}`, this.left - 10, y);
  }

  drawPointer(context, top, bottom) {
    if (this.pointer === null || this.pointer < this.from || this.pointer > this.to) return;
    context.fillStyle = theme.colour("ink");
    context.fillRect(Math.round(this.x(this.pointer)), top, 1, bottom - top);
  }
}
