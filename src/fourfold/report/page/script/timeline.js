/* The pipeline timeline: a row per rank, a box per action, time from left to right. */

// Thin lines under a row, top to bottom.
const TRACKS = [["SEND_F"], ["SEND_B"], ["GATHER", "REDUCE"], ["TP"], ["CP"], ["PP"], ["DP"]];
const TRACK_HEIGHT = 5;
const ROW_GAP = 3;
const WAIT_WIDTH = 76; // pixels: an empty stretch as wide says how long it is ...
const HATCH_WIDTH = 12; // ... and as wide is hatched
const NARROW = 7; // device pixels: narrower boxes are averaged over the pixels that they share

class Timeline {
  constructor(host, data, bytes, frame) {
    Object.assign(this, { host, data, frame });
    this.boxes = new Boxes(data, data.boxes, bytes);
    this.lanes = data.lanes && new Boxes(data, data.lanes, bytes);
    this.tracks = TRACKS.filter((names) => this.lanes?.has(names));
    this.withLanes = false;
    this.rowHeight = Number(host.dataset.rowHeight);
    this.idle = data.rows.map((_, row) => this.boxes.idle(row, frame.span) / frame.span);
    this.selected = 0;
    this.hovered = null; // what is under the pointer: see find()
    this.kept = null; // likewise, what was clicked: its words stay
    this.cursor = -1; // the box that the keys n and p are at
    this.strip = new Strip(); // what the pixels of a row have on them
    this.widest = data.rows.map((_, row) => this.boxes.widestLabel(row));
    this.onSelect = (row) => this.select(row); // when a row is chosen here
    this.content = document.createElement("div"); // as tall as all rows; the canvas stays where it is
    this.content.className = "content";
    host.append(this.content);
    this.surface = new Surface(this.content, { draw: () => this.draw(), mark: () => this.mark() });
    host.addEventListener("scroll", () => this.surface.ask("draw"));
    listen(host, frame, {
      hover: (x, y) => this.hover(x, y),
      leave: () => this.leave(),
      click: (x, y) => this.click(x, y),
      scroll: (by) => host.scrollBy(0, by),
      key: (key) => this.key(key),
    });
  }

  get pitch() {
    return this.rowHeight + (this.withLanes ? this.tracks.length * TRACK_HEIGHT + 2 : 0);
  }

  /** The margin that the longest row label needs. */
  labelWidth() {
    this.surface.context.font = this.labelFont(700);
    const widths = this.data.rows.map((label) => this.surface.context.measureText(label).width);
    return Math.max(0, ...widths) + 30;
  }

  labelFont(weight) {
    return font(Math.min(textSize(0.9), this.rowHeight - 3), weight);
  }

  resize() {
    const height = AXIS_HEIGHT + this.pitch * this.data.rows.length;
    this.content.style.height = `${height}px`;
    this.host.style.height = `${height}px`; // page.css limits it; what is more is scrolled
    this.surface.resize(this.host.clientWidth, this.host.clientHeight);
    this.surface.ask("draw");
  }

  showLanes(shown) {
    this.withLanes = shown;
    this.resize();
  }

  y(row) {
    return AXIS_HEIGHT + row * this.pitch - this.host.scrollTop;
  }

  rowAt(y) {
    const row = Math.floor((y - AXIS_HEIGHT + this.host.scrollTop) / this.pitch);
    return y >= AXIS_HEIGHT && row < this.data.rows.length ? row : -1;
  }

  draw() {
    const { surface, frame, data } = this;
    const { context } = surface;
    surface.clear(context);
    const bottom = Math.min(this.y(data.rows.length), surface.height);
    const [begin, end] = [surface.snap(frame.x(0)), surface.snap(frame.x(frame.span))];
    const first = Math.max(0, this.rowAt(AXIS_HEIGHT));
    const last = Math.min(data.rows.length, first + Math.ceil(surface.height / this.pitch) + 1);
    context.save();
    context.beginPath();
    context.rect(frame.left, AXIS_HEIGHT, frame.right - frame.left, surface.height);
    context.clip();
    const labels = [];
    for (let row = first; row < last; row++) {
      context.fillStyle = theme.colour("idle");
      context.fillRect(begin, this.y(row), end - begin, this.rowHeight - ROW_GAP);
      this.drawBoxes(this.boxes, row, this.y(row), this.rowHeight - ROW_GAP, labels);
      if (this.withLanes) this.drawLanes(row);
    }
    this.drawLabels(labels);
    for (let row = first; row < last; row++) this.drawWaits(row);
    context.restore();
    context.clearRect(0, 0, surface.width, AXIS_HEIGHT);
    frame.drawAxis(context, AXIS_HEIGHT / 2, AXIS_HEIGHT - 5, AXIS_HEIGHT);
    for (let row = first; row < last; row++) this.drawRowLabel(row);
    Object.assign(this.host.dataset, {
      from: frame.from, to: frame.to, left: frame.left, right: frame.right, top: AXIS_HEIGHT, pitch: this.pitch, bottom,
    });
  }

  /** The boxes of a row that can be seen. Those with room for a number are added to `labels`: one of a run of boxes that
   * are the parts of one action, with waits between them. */
  drawBoxes(boxes, row, y, height, labels, kinds = null) {
    const { surface, frame } = this;
    const { context, ratio } = surface;
    const wide = [];
    let run = null;
    this.strip.clear(Math.ceil((frame.right - frame.left) * ratio));
    for (let i = boxes.firstAfter(row, frame.from); i < boxes.first[row + 1] && boxes.start[i] < frame.to; i++) {
      if (kinds && !kinds.includes(boxes.kindName(i))) continue;
      const left = Math.max(frame.x(boxes.start[i]), frame.left - 10);
      const right = Math.min(frame.x(boxes.end[i]), frame.right + 10);
      if (labels) run = this.addToRun(run, labels, i, row, Math.max(left, frame.left), Math.min(right - 1, frame.right));
      if ((right - left) * ratio >= NARROW) wide.push([i, left, right]);
      else this.strip.add((left - frame.left) * ratio, (right - frame.left) * ratio, boxes.channels(i));
    }
    this.strip.paint(context, frame.left, y, height, ratio);
    for (const [i, start, end] of wide) {
      const [left, right] = [surface.snap(start), surface.snap(end)];
      context.fillStyle = boxes.colour(i);
      context.fillRect(left, y, right - left, height);
      // A line of paper between boxes, which is not the grey of an idle stretch.
      context.fillStyle = theme.colour("paper");
      context.fillRect(right - 1, y, 1, height);
    }
  }

  /** The last of `labels` with another box, or a new one of it: {i, row, left, right, widest}. */
  addToRun(run, labels, i, row, left, right) {
    if (!run || !this.boxes.sameAction(run.i, i)) {
      labels.push({ i, row, left, right, widest: [left, right] });
      return labels[labels.length - 1];
    }
    run.right = right;
    if (right - left > run.widest[1] - run.widest[0]) run.widest = [left, right];
    return run;
  }

  drawLanes(row) {
    this.tracks.forEach((kinds, track) => {
      const y = this.y(row) + this.rowHeight - ROW_GAP + 1 + track * TRACK_HEIGHT;
      this.drawBoxes(this.lanes, row, y, TRACK_HEIGHT - 1, null, kinds);
    });
  }

  /** The micro-batches of boxes that have room for the longest label of their row: all of a kind or none. */
  drawLabels(labels) {
    const { context } = this.surface;
    const height = this.rowHeight - ROW_GAP;
    const size = Math.min(textSize(0.95), Math.round(height * 0.75));
    if (size < 8) return;
    context.font = font(size);
    context.textAlign = "center";
    context.textBaseline = "middle";
    const digit = context.measureText("0").width;
    for (const { i, row, widest, ...run } of labels) {
      const text = this.boxes.label(i);
      const room = Math.max(text.length, this.widest[row]) * digit + 2;
      const [left, right] = widest[1] - widest[0] >= room ? widest : [run.left, run.right];
      if (room > right - left) continue;
      context.fillStyle = this.boxes.ink(i);
      context.fillText(text, (left + right) / 2, this.y(row) + height / 2 + 1);
    }
  }

  /** Hatches the wider idle stretches of a row, and says how long the widest last. */
  drawWaits(row) {
    const { surface, frame, boxes } = this;
    const { context } = surface;
    const perPixel = (frame.to - frame.from) / (frame.right - frame.left);
    const [y, height] = [this.y(row), this.rowHeight - ROW_GAP];
    context.font = font(Math.min(textSize(0.85), height - 2), 600);
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (const { from, to } of boxes.gaps(row, frame, HATCH_WIDTH * perPixel)) {
      const [left, right] = [Math.max(frame.x(from), frame.left), Math.min(frame.x(to), frame.right)];
      hatch(context, left, right, y, height);
      if (this.rowHeight < 16 || right - left < WAIT_WIDTH) continue;
      const text = quantity(to - from, frame.unit);
      const half = context.measureText(text).width / 2 + 5;
      context.fillStyle = theme.colour("idle");
      context.fillRect((left + right) / 2 - half, y, 2 * half, height);
      context.fillStyle = theme.colour("ink");
      context.fillText(text, (left + right) / 2, y + height / 2 + 1);
    }
  }

  drawRowLabel(row) {
    const { surface, frame } = this;
    const { context } = surface;
    const middle = this.y(row) + (this.rowHeight - ROW_GAP) / 2 + 1;
    if (middle < AXIS_HEIGHT + 4) return;
    const chosen = row === this.selected;
    context.font = this.labelFont(chosen ? 700 : 400);
    context.textBaseline = "middle";
    context.textAlign = "right";
    context.fillStyle = theme.colour("ink");
    context.fillText(this.data.rows[row], frame.left - 10, middle, frame.left - 24);
    context.fillStyle = theme.colour("quiet");
    context.fillText(shareWords(this.idle[row]), surface.width - 4, middle);
    if (row === 0) context.fillText("idle", surface.width - 4, AXIS_HEIGHT / 2);
    if (!chosen) return;
    context.fillStyle = theme.colour("accent");
    context.fillRect(0, this.y(row), 5, this.rowHeight - ROW_GAP);
  }

  mark() {
    const { surface, frame, boxes } = this;
    const context = surface.marks;
    surface.clear(context);
    context.save();
    context.beginPath();
    context.rect(frame.left, AXIS_HEIGHT, frame.right - frame.left, surface.height);
    context.clip();
    const shown = this.hovered?.boxes ? this.hovered : this.kept;
    if (shown?.boxes) this.markMicroBatch(context, shown);
    frame.drawPointer(context, AXIS_HEIGHT, surface.height);
    for (const found of new Set([this.kept, this.hovered])) if (found) this.outline(context, found);
    context.restore();
    if (this.cursor < 0) return;
    const middle = frame.x((boxes.start[this.cursor] + boxes.end[this.cursor]) / 2);
    if (middle >= frame.left && middle <= frame.right) this.pointAt(context, middle, this.y(boxes.rowOf(this.cursor)));
  }

  /** A frame around a box or an idle stretch, and before a box its wait, along the lower edge. */
  outline(context, found) {
    const { frame } = this;
    const y = this.y(found.row) + found.offset;
    const [left, right] = [frame.x(found.from), frame.x(found.to)];
    if (found.boxes === this.boxes) {
      context.fillStyle = theme.colour("alarm");
      const before = frame.x(found.from - this.boxes.wait[found.box]);
      context.fillRect(before, y + found.height - 4, left - before, 4);
    }
    context.strokeStyle = theme.colour("ink");
    context.lineWidth = 2;
    context.strokeRect(left, y, Math.max(right - left, 2), found.height);
  }

  /** Two triangles, so that a box is found however narrow it is. */
  pointAt(context, x, y) {
    const bottom = y + this.rowHeight - ROW_GAP;
    context.fillStyle = theme.colour("mark");
    context.strokeStyle = theme.colour("paper");
    context.lineWidth = 1.5;
    for (const [tip, base] of [[y - 1, y - 13], [bottom + 1, bottom + 13]]) {
      context.beginPath();
      context.moveTo(x, tip);
      context.lineTo(x - 8, base);
      context.lineTo(x + 8, base);
      context.closePath();
      context.fill();
      context.stroke();
    }
  }

  /** The way of the micro-batch under the pointer through all ranks. */
  markMicroBatch(context, { boxes, box }) {
    if (boxes.microBatch[box] < 0) return;
    const height = this.rowHeight - ROW_GAP;
    context.fillStyle = context.strokeStyle = theme.colour("mark");
    context.lineWidth = 3;
    for (const [i, row] of this.boxes.ofMicroBatch(boxes.microBatch[box])) {
      const [left, right] = [this.frame.x(this.boxes.start[i]), this.frame.x(this.boxes.end[i])];
      if (right < this.frame.left || left > this.frame.right) continue;
      if (right - left < 14) context.fillRect(left, this.y(row), Math.max(right - left, 2), height);
      else context.strokeRect(left + 1.5, this.y(row) + 1.5, right - left - 4, height - 3);
    }
  }

  /** What is at a place: a box, a message or an idle stretch {row, offset, height, from, to, boxes?, box}; or null. */
  find(x, y) {
    const row = this.rowAt(y);
    const time = this.frame.time(x);
    if (row < 0 || x < this.frame.left || x > this.frame.right) return null;
    const height = this.rowHeight - ROW_GAP;
    const below = y - this.y(row) - (height + 1);
    if (this.withLanes && below >= 0) {
      const track = Math.min(Math.floor(below / TRACK_HEIGHT), this.tracks.length - 1);
      const box = this.lanes.at(row, time, this.tracks[track]);
      return box < 0 ? null : this.found(row, height + 1 + track * TRACK_HEIGHT, TRACK_HEIGHT - 1, this.lanes, box);
    }
    const box = this.boxes.at(row, time);
    if (box >= 0) return this.found(row, 0, height, this.boxes, box);
    return { row, offset: 0, height, boxes: null, ...this.boxes.gap(row, time, this.frame.span) };
  }

  /** `offset` and `height`: pixels, from the top of the row. */
  found(row, offset, height, boxes, box) {
    return { row, offset, height, boxes, box, from: boxes.start[box], to: boxes.end[box] };
  }

  hover(x, y) {
    this.hovered = this.find(x, y);
    this.frame.point(x >= this.frame.left && x <= this.frame.right ? this.frame.time(x) : null);
    this.surface.ask("mark");
    if (!this.hovered || this.same(this.hovered, this.kept)) return tip.hide();
    const place = this.host.getBoundingClientRect();
    tip.show(place.left + x, place.top + y, this.words(this.hovered), place);
  }

  same(one, other) {
    return Boolean(one && other) && one.row === other.row && one.offset === other.offset && one.from === other.from;
  }

  /** Selects the row, and keeps the words of what is there; of what is kept already it lets go. */
  click(x, y) {
    const row = this.rowAt(y);
    if (row >= 0) this.onSelect(row);
    const found = this.find(x, y);
    const again = this.same(found, this.kept);
    tip.release();
    if (!found || again) return this.hover(x, y);
    this.hover(x, y);
    tip.keep(() => {
      this.kept = this.frame.chosen = null;
      this.surface.ask("mark");
    });
    this.kept = found;
    this.frame.chosen = (found.from + found.to) / 2;
  }

  leave() {
    this.hovered = null;
    this.frame.point(null);
    this.surface.ask("mark");
    tip.hide();
  }

  /** What the tip says of a box or of an empty stretch. */
  words({ row, boxes, box, from, to, next }) {
    const { instants, unit } = this.frame;
    const cause = (of, index) => this.data.causes[of.cause[index]] ?? "";
    const where = this.data.rows[row];
    const lines = [
      ["start", instant(from, instants)],
      ["end", instant(to, instants)],
      [boxes ? "takes" : "lasts", quantity(to - from, unit)],
    ];
    if (boxes) {
      const wait = boxes.wait[box];
      if (boxes === this.boxes) lines.push(["waited before", wait > 0 ? quantity(wait, unit) : "not at all"]);
      return {
        title: boxes.action(box), words: `${boxes.words(box)}, on ${where}`, colour: boxes.colour(box), lines, note: cause(boxes, box),
      };
    }
    if (next < 0) return { title: "idle", words: where, lines, note: "Nothing more to do in this step." };
    lines.push(["then", this.boxes.action(next)]);
    return { title: "idle", words: `${where} waits`, lines, note: cause(this.boxes, next) };
  }

  select(row) {
    this.selected = row;
    this.surface.ask("draw");
  }

  key(key) {
    const rows = this.data.rows.length;
    if (key === "ArrowUp") this.onSelect(Math.max(this.selected - 1, 0));
    else if (key === "ArrowDown") this.onSelect(Math.min(this.selected + 1, rows - 1));
    else if (key === "n" || key === "p") this.step(key === "n" ? 1 : -1);
    else if (key === "Escape") this.forget();
    else return false;
    const y = this.selected * this.pitch;
    if (this.y(this.selected) < AXIS_HEIGHT) this.host.scrollTop = y;
    const room = this.surface.height - AXIS_HEIGHT - this.pitch;
    if (y - this.host.scrollTop > room) this.host.scrollTop = y - room;
    return true;
  }

  forget() {
    this.cursor = -1;
    this.frame.chosen = null;
    tip.release();
    this.leave();
  }

  /** To the next or previous box of the selected row, from what is shown if there was none. */
  step(by) {
    const { boxes, frame, selected: row } = this;
    const [first, end] = [boxes.first[row], boxes.first[row + 1]];
    if (first === end) return;
    const inside = (box) => box >= first && box < end;
    const pointed = this.hovered?.boxes === boxes ? this.hovered.box : -1;
    const from = [this.cursor, pointed].find(inside);
    this.cursor = Math.min(Math.max(from === undefined ? boxes.firstAfter(row, frame.from) : from + by, first), end - 1);
    frame.chosen = (boxes.start[this.cursor] + boxes.end[this.cursor]) / 2;
    this.host.scrollIntoView({ block: "nearest" });
    frame.reveal(boxes.start[this.cursor], boxes.end[this.cursor]);
    this.hover(frame.x((boxes.start[this.cursor] + boxes.end[this.cursor]) / 2), this.y(row) + this.rowHeight / 2 - 2);
  }
}
