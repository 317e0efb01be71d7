/* The pipeline timeline: a row per rank, a box per action, time from left to right. */

const TRACKS = [["SEND_F"], ["SEND_B"], ["GATHER", "REDUCE"]]; // thin lines under a row, top to bottom
const TRACK_HEIGHT = 5;
const ROW_GAP = 3;
const WAIT_WIDTH = 64; // pixels: an empty stretch as wide says how long it is

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
    this.cursor = -1; // the box that the keys n and p are at
    this.onSelect = (row) => this.select(row); // when a row is chosen here
    this.content = document.createElement("div"); // as tall as all rows; the canvas stays where it is
    this.content.className = "content";
    host.append(this.content);
    this.surface = new Surface(this.content, { draw: () => this.draw(), mark: () => this.mark() });
    host.addEventListener("scroll", () => this.surface.ask("draw"));
    listen(host, frame, {
      hover: (x, y) => this.hover(x, y),
      leave: () => this.leave(),
      click: (x, y) => this.onSelect(this.rowAt(y)),
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
    return font(Math.min(15, this.rowHeight - 1), weight);
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
      // A thin line where nothing happens: empty, and yet a row.
      context.fillStyle = theme.colour("faint");
      context.fillRect(begin, surface.snap(this.y(row) + (this.rowHeight - ROW_GAP) / 2), end - begin, 1);
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

  /** The boxes of a row that can be seen. Those with room for a number are added to `labels`. */
  drawBoxes(boxes, row, y, height, labels, kinds = null) {
    const { surface, frame } = this;
    const { context } = surface;
    const pixel = 1 / surface.ratio;
    let painted = -Infinity; // up to here every pixel has its colour
    for (let i = boxes.firstAfter(row, frame.from); i < boxes.first[row + 1] && boxes.start[i] < frame.to; i++) {
      if (kinds && !kinds.includes(boxes.kindName(i))) continue;
      let left = surface.snap(Math.max(frame.x(boxes.start[i]), frame.left - 10));
      const right = Math.max(surface.snap(Math.min(frame.x(boxes.end[i]), frame.right + 10)), left + pixel);
      if (right <= painted) continue;
      left = Math.max(left, painted);
      painted = right;
      // A gap only between boxes that stay wide enough with it.
      const width = right - left - (right - left > 5 ? 1 : 0);
      context.fillStyle = boxes.colour(i);
      context.fillRect(left, y, width, height);
      if (labels && width > 8) labels.push([i, Math.max(left, frame.left), Math.min(left + width, frame.right), y]);
    }
  }

  drawLanes(row) {
    this.tracks.forEach((kinds, track) => {
      const y = this.y(row) + this.rowHeight - ROW_GAP + 1 + track * TRACK_HEIGHT;
      this.drawBoxes(this.lanes, row, y, TRACK_HEIGHT - 1, null, kinds);
    });
  }

  drawLabels(labels) {
    const { context } = this.surface;
    const height = this.rowHeight - ROW_GAP;
    const size = Math.min(15, Math.round(height * 0.72));
    if (size < 8) return;
    context.font = font(size);
    context.textAlign = "center";
    context.textBaseline = "middle";
    const digit = context.measureText("0").width;
    for (const [i, left, right, y] of labels) {
      const text = this.boxes.label(i);
      if (text.length * digit + 2 > right - left) continue;
      context.fillStyle = this.boxes.ink(i);
      context.fillText(text, (left + right) / 2, y + height / 2 + 1);
    }
  }

  /** How long the wider empty stretches of a row last. */
  drawWaits(row) {
    const { surface, frame, boxes } = this;
    const { context } = surface;
    const perPixel = (frame.to - frame.from) / (frame.right - frame.left);
    if (this.rowHeight < 16) return;
    context.font = font(13);
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (const { from, to } of boxes.gaps(row, frame, WAIT_WIDTH * perPixel)) {
      const text = quantity(to - from, frame.unit);
      const x = frame.x((Math.max(from, frame.from) + Math.min(to, frame.to)) / 2);
      const y = this.y(row) + (this.rowHeight - ROW_GAP) / 2 + 1;
      const half = context.measureText(text).width / 2 + 4;
      context.clearRect(x - half, y - 3, 2 * half, 4);
      context.fillStyle = theme.colour("quiet");
      context.fillText(text, x, y);
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
    context.fillText(`${(this.idle[row] * 100).toFixed(1)}%`, surface.width - 4, middle);
    if (row === 0) context.fillText("idle", surface.width - 4, AXIS_HEIGHT / 2);
    if (!chosen) return;
    context.fillStyle = theme.colour("accent");
    context.fillRect(0, this.y(row), 5, this.rowHeight - ROW_GAP);
  }

  mark() {
    const { surface, frame, hovered } = this;
    const context = surface.marks;
    surface.clear(context);
    context.save();
    context.beginPath();
    context.rect(frame.left, AXIS_HEIGHT, frame.right - frame.left, surface.height);
    context.clip();
    if (hovered?.boxes) this.markMicroBatch(context, hovered);
    frame.drawPointer(context, AXIS_HEIGHT, surface.height);
    if (hovered?.boxes === this.boxes) {
      // The wait before the box, as a bar in the middle of the empty stretch.
      context.fillStyle = theme.colour("alarm");
      const before = frame.x(hovered.from - this.boxes.wait[hovered.box]);
      context.fillRect(before, hovered.y + hovered.height / 2 - 2, frame.x(hovered.from) - before, 4);
    }
    if (hovered) {
      const [left, right] = [frame.x(hovered.from), frame.x(hovered.to)];
      context.strokeStyle = theme.colour("ink");
      context.lineWidth = 2;
      context.strokeRect(left, hovered.y, Math.max(right - left, 2), hovered.height);
    }
    context.restore();
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

  /** What is at a place: a box, a message or an empty stretch {row, y, height, from, to, boxes?, box}; or null. */
  find(x, y) {
    const row = this.rowAt(y);
    const time = this.frame.time(x);
    if (row < 0 || x < this.frame.left || x > this.frame.right) return null;
    const below = y - this.y(row) - (this.rowHeight - ROW_GAP + 1);
    if (this.withLanes && below >= 0) {
      const track = Math.min(Math.floor(below / TRACK_HEIGHT), this.tracks.length - 1);
      const box = this.lanes.at(row, time, this.tracks[track]);
      const top = this.y(row) + this.rowHeight - ROW_GAP + 1 + track * TRACK_HEIGHT;
      return box < 0 ? null : this.found(row, top, TRACK_HEIGHT - 1, this.lanes, box);
    }
    const [top, height] = [this.y(row), this.rowHeight - ROW_GAP];
    const box = this.boxes.at(row, time);
    if (box >= 0) return this.found(row, top, height, this.boxes, box);
    return { row, y: top, height, boxes: null, ...this.boxes.gap(row, time, this.frame.span) };
  }

  found(row, y, height, boxes, box) {
    return { row, y, height, boxes, box, from: boxes.start[box], to: boxes.end[box] };
  }

  hover(x, y) {
    this.hovered = this.find(x, y);
    this.frame.point(x >= this.frame.left && x <= this.frame.right ? this.frame.time(x) : null);
    this.surface.ask("mark");
    if (!this.hovered) return tip.hide();
    const place = this.host.getBoundingClientRect();
    tip.show(place.left + x, place.top + y, this.words(this.hovered));
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
    const lines = [
      ["on", this.data.rows[row]],
      ["start", instant(from, instants)],
      ["end", instant(to, instants)],
      [boxes ? "takes" : "lasts", quantity(to - from, unit)],
    ];
    if (boxes) {
      const wait = boxes.wait[box];
      if (boxes === this.boxes) lines.push(["waited before", wait > 0 ? quantity(wait, unit) : "not at all"]);
      return {
        title: boxes.action(box), words: boxes.words(box), colour: boxes.colour(box), lines, note: cause(boxes, box),
      };
    }
    if (next < 0) return { title: "empty", lines, note: "Nothing more to do in this step." };
    lines.push(["then", this.boxes.action(next)]);
    return { title: "empty", words: "the rank waits", lines, note: cause(this.boxes, next) };
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
    else if (key === "Escape") this.leave();
    else return false;
    const y = this.selected * this.pitch;
    if (this.y(this.selected) < AXIS_HEIGHT) this.host.scrollTop = y;
    const room = this.surface.height - AXIS_HEIGHT - this.pitch;
    if (y - this.host.scrollTop > room) this.host.scrollTop = y - room;
    return true;
  }

  /** To the next or previous box of the selected row, from what is shown if there was none. */
  step(by) {
    const { boxes, frame, selected: row } = this;
    const [first, end] = [boxes.first[row], boxes.first[row + 1]];
    if (first === end) return;
    const inside = this.cursor >= first && this.cursor < end;
    this.cursor = inside ? this.cursor + by : boxes.firstAfter(row, frame.from);
    this.cursor = Math.min(Math.max(this.cursor, first), end - 1);
    frame.reveal(boxes.start[this.cursor], boxes.end[this.cursor]);
    this.hover(frame.x((boxes.start[this.cursor] + boxes.end[this.cursor]) / 2), this.y(row) + this.rowHeight / 2 - 2);
  }
}
