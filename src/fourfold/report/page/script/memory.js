/* Live bytes (or what else is held) over the timeline's time: one rank by kind as areas, the others' sums as lines. */

const DENSE = 4; // pixels: where a line has more than a step in as many, its upper edge is drawn instead ...
const COARSE = 12; // ... in columns of as many, or many lines would become one grey band

class Memory {
  /** @param views what can be shown, of the same rows: the first is shown at first. */
  constructor(host, views, bytes, frame) {
    Object.assign(this, { host, frame, views, columnBytes: bytes });
    this.read(0);
    this.selected = 0;
    this.withOthers = false;
    this.onSelect = (row) => this.select(row); // when a row is chosen here
    this.surface = new Surface(host, { draw: () => this.draw(), mark: () => this.mark() });
    listen(host, frame, {
      hover: (x, y) => this.hover(x, y),
      leave: () => this.leave(),
      click: (x, y) => this.onSelect(this.nearest(x, y)),
      scroll: () => {},
      key: (key) => this.key(key),
    });
  }

  /** Takes the numbers of a view. */
  read(view) {
    const [data, bytes] = [this.views[view], this.columnBytes];
    Object.assign(this, { view, data });
    this.first = readColumn(bytes, data.first);
    this.times = readColumn(bytes, data.times);
    this.held = readColumn(bytes, data.bytes); // [row][part][time]
    this.totals = new Float64Array(this.times.length);
    this.peak = data.rows.map((_, row) => this.sum(row)); // index of each row's largest total; -1: no times
    const largest = Math.max(0, ...this.peak.map((i) => (i < 0 ? 0 : this.totals[i])));
    // The limit is drawn if it does not press the curves flat.
    this.limit = data.capacity && data.capacity < 3 * largest ? data.capacity : null;
    this.top = Math.max(largest, this.limit ?? 0) * 1.16 || 1; // with room for a text above
  }

  /** The colour of a part; a chunk has that of its forwards. */
  colour(part) {
    return this.data.colours ? this.data.colours[part] : theme.colour(`F-${part}`);
  }

  /** The row with the highest peak. */
  get fullest() {
    const peaks = this.peak.map((i) => (i < 0 ? 0 : this.totals[i]));
    return Math.max(0, peaks.indexOf(Math.max(...peaks)));
  }

  get bottom() {
    return this.surface.height - AXIS_HEIGHT;
  }

  /** Adds up a row's parts. */
  sum(row) {
    const [first, end] = [this.first[row], this.first[row + 1]];
    let peak = -1;
    for (let i = first; i < end; i++) {
      for (let part = 0; part < this.data.parts.length; part++) this.totals[i] += this.bytes(row, part, i);
      // By more than rounding: of a plateau the beginning.
      if (peak < 0 || this.totals[i] > this.totals[peak] * (1 + 1e-6)) peak = i;
    }
    return peak;
  }

  bytes(row, part, i) {
    const [first, end] = [this.first[row], this.first[row + 1]];
    return this.held[first * this.data.parts.length + part * (end - first) + (i - first)];
  }

  /** The index of what is alive at a time: the last that began; -1 before the first. */
  at(row, time) {
    let [low, high] = [this.first[row], this.first[row + 1]];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.times[middle] <= time) low = middle + 1;
      else high = middle;
    }
    return low > this.first[row] ? low - 1 : -1;
  }

  resize() {
    this.surface.resize(this.host.clientWidth, this.host.clientHeight);
    this.surface.ask("draw");
  }

  y(bytes) {
    return this.bottom - (bytes / this.top) * (this.bottom - 10);
  }

  /**
   * Which index of a row to show in each column of some device pixels: of all that are alive within it the one with
   * most bytes, so that no peak is lost.
   */
  columns(row, pixels) {
    const { frame } = this;
    const width = pixels / this.surface.ratio;
    const perColumn = ((frame.to - frame.from) / (frame.right - frame.left)) * width;
    const shown = new Int32Array(Math.ceil((frame.right - frame.left) / width));
    const [first, end] = [this.first[row], this.first[row + 1]];
    let i = this.at(row, frame.from); // -1: nothing yet
    for (let column = 0; column < shown.length; column++) {
      let most = i;
      const until = frame.from + (column + 1) * perColumn;
      for (let next = i < 0 ? first : i + 1; next < end && this.times[next] < until; next++) {
        i = next;
        if (most < 0 || this.totals[i] > this.totals[most]) most = i;
      }
      shown[column] = most;
    }
    return { shown, width };
  }

  dense(row) {
    const steps = this.at(row, this.frame.to) - this.at(row, this.frame.from);
    return steps * DENSE > this.frame.right - this.frame.left;
  }

  draw() {
    const { surface, frame } = this;
    const { context } = surface;
    surface.clear(context);
    this.drawScale(context);
    frame.drawAxis(context, surface.height - AXIS_HEIGHT / 2 + 2, 0, this.bottom + 5);
    context.save();
    context.beginPath();
    context.rect(frame.left, 0, frame.right - frame.left, surface.height);
    context.clip();
    const areas = this.columns(this.selected, 1);
    context.globalAlpha = 0.9; // as .areas in page.css: the lines stay visible
    this.drawAreas(context, areas);
    if (this.withOthers) this.drawOthers(context);
    context.globalAlpha = 1;
    context.lineWidth = 2;
    context.strokeStyle = theme.colour("ink");
    this.drawLine(context, areas);
    if (this.limit) this.drawLimit(context);
    this.drawPeak(context);
    context.restore();
    Object.assign(this.host.dataset, { from: frame.from, to: frame.to, left: frame.left, right: frame.right });
  }

  /** Thin and pale: many lines are not to hide the areas. */
  drawOthers(context) {
    context.lineWidth = 1;
    context.globalAlpha = Math.min(0.5, Math.max(0.15, 6 / this.data.rows.length));
    context.strokeStyle = theme.colour("ink");
    for (let row = 0; row < this.data.rows.length; row++) {
      if (row !== this.selected) this.drawLine(context, this.columns(row, this.dense(row) ? COARSE : 1));
    }
  }

  showOthers(shown) {
    this.withOthers = shown;
    this.surface.ask("draw");
  }

  /** Which parts a row ever has. */
  partsOf(row) {
    const steps = Array.from({ length: this.first[row + 1] - this.first[row] }, (_, i) => this.first[row] + i);
    return this.data.parts.map((_, part) => steps.some((i) => this.bytes(row, part, i) > 0));
  }

  drawScale(context) {
    const [name, unit] = isBytes(this.data.quantity) ? BYTES.find(([, size]) => this.top >= size) ?? BYTES[4] : ["", 1];
    const step = roundStep(Math.max((this.top / unit) * 0.17, name ? 0 : 1)); // what is counted has no halves
    context.font = font(textSize(0.9));
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (let value = 0; value * unit <= this.top; value += step) {
      const y = Math.round(this.y(value * unit));
      context.fillStyle = theme.colour("faint");
      context.fillRect(this.frame.left, y, this.frame.right - this.frame.left, 1);
      context.fillStyle = theme.colour("quiet");
      context.fillText(`${number(value, 2)} ${name}`.trim(), this.frame.left - 10, y);
    }
  }

  /** An amount in its unit. */
  words(amount) {
    return quantity(amount, this.data.quantity);
  }

  /** One polygon per part, from the sum of the parts below it to that with it. */
  drawAreas(context, { shown, width }) {
    let floor = new Float64Array(shown.length);
    for (let part = 0; part < this.data.parts.length; part++) {
      const ceiling = floor.slice();
      for (let k = 0; k < shown.length; k++) {
        if (shown[k] >= 0) ceiling[k] += this.bytes(this.selected, part, shown[k]);
      }
      context.fillStyle = this.colour(part);
      context.beginPath();
      for (let k = 0; k < shown.length; k++) this.stair(context, ceiling, k, k + 1, width);
      for (let k = shown.length - 1; k >= 0; k--) this.stair(context, floor, k + 1, k, width);
      context.fill();
      floor = ceiling;
    }
  }

  /** A level stretch over one column, unless its neighbours on both sides are as high. */
  stair(context, levels, from, to, width) {
    const k = Math.min(from, to);
    if (levels[k] === levels[k - 1] && levels[k] === levels[k + 1]) return;
    context.lineTo(this.frame.left + from * width, this.y(levels[k]));
    context.lineTo(this.frame.left + to * width, this.y(levels[k]));
  }

  drawLine(context, { shown, width }) {
    const levels = Float64Array.from(shown, (i) => (i < 0 ? 0 : this.totals[i]));
    context.beginPath();
    for (let k = 0; k < levels.length; k++) this.stair(context, levels, k, k + 1, width);
    context.stroke();
  }

  /** On a ground of its own, so that it is seen on any area. Its name is on that side of it where the curve is not. */
  drawLimit(context) {
    const { left, right } = this.frame;
    const y = Math.round(this.y(this.limit));
    context.fillStyle = theme.colour("paper");
    context.fillRect(left, y - 3, right - left, 6);
    context.fillStyle = theme.colour("alarm");
    for (let x = left; x < right; x += 15) context.fillRect(x, y - 1.5, 10, 3);
    context.font = font(textSize(0.9), 600);
    context.textAlign = "left";
    context.textBaseline = "alphabetic";
    const words = `usable memory of one GPU ${this.words(this.limit)}`;
    const over = this.frame.time(left + 20 + context.measureText(words).width);
    let above = this.at(this.selected, this.frame.from);
    const last = this.at(this.selected, over);
    while (above < last && !(this.totals[above] > this.limit)) above++;
    this.text(context, words, left + 8, above >= 0 && this.totals[above] > this.limit ? y + textSize(0.9) + 9 : y - 9);
  }

  /** A text on a ground of its own, so that it is readable on areas and lines. */
  text(context, words, x, y) {
    const width = context.measureText(words).width + 8;
    const ink = context.fillStyle;
    context.fillStyle = theme.colour("paper");
    context.globalAlpha = 0.85;
    const size = textSize(0.9);
    context.fillRect(context.textAlign === "right" ? x - width + 4 : x - 4, y - size, width, size + 5);
    context.globalAlpha = 1;
    context.fillStyle = ink;
    context.fillText(words, x, y);
  }

  drawPeak(context) {
    const { frame } = this;
    const i = this.peak[this.selected];
    if (!(i >= 0) || this.times[i] < frame.from || this.times[i] > frame.to) return;
    const [x, y] = [frame.x(this.times[i]), this.y(this.totals[i])];
    context.beginPath();
    context.arc(x, y, 6, 0, 7);
    context.fillStyle = theme.colour("alarm");
    context.fill();
    context.lineWidth = 2;
    context.strokeStyle = theme.colour("paper");
    context.stroke();
    const amount = isBytes(this.data.quantity) ? bytesText(this.totals[i]) : digits(this.totals[i]);
    const words = `peak ${amount} at ${quantity(this.times[i], frame.unit)}`;
    context.font = font(textSize(0.9), 600);
    context.textBaseline = "alphabetic";
    context.fillStyle = theme.colour("ink");
    const wide = context.measureText(words).width + 14;
    const leftwards = x + wide > frame.right;
    context.textAlign = leftwards ? "right" : "left";
    const size = textSize(0.9);
    const onLimit = this.limit && Math.abs(y - size - this.y(this.limit)) < size + 2;
    this.text(context, words, x + (leftwards ? -12 : 12), y < size + 12 || onLimit ? y + size + 14 : y - 9);
  }

  mark() {
    this.surface.clear(this.surface.marks);
    this.frame.drawPointer(this.surface.marks, 0, this.bottom);
  }

  hover(x, y) {
    const { frame, data, selected: row } = this;
    if (x < frame.left || x > frame.right || !data.rows.length) return this.leave();
    const time = frame.time(x);
    frame.point(time);
    const i = this.at(row, time);
    const held = (part) => (i < 0 ? 0 : this.bytes(row, part, i));
    const parts = data.parts.map((name, part) => [name, held(part), this.colour(part)]).reverse();
    const place = this.host.getBoundingClientRect();
    tip.show(place.left + x, place.top + y, {
      title: this.words(i < 0 ? 0 : this.totals[i]),
      words: `on ${data.rows[row]} at ${instant(time, frame.instants)}`,
      lines: parts.filter(([, amount]) => amount > 0).map(([name, amount, shade]) => [name, this.words(amount), shade]),
    });
  }

  leave() {
    this.frame.point(null);
    tip.hide();
  }

  /** The row whose line is nearest to a place. */
  nearest(x, y) {
    const apart = this.data.rows.map((_, row) => {
      const i = this.at(row, this.frame.time(x));
      return Math.abs(this.y(i < 0 ? 0 : this.totals[i]) - y);
    });
    return apart.indexOf(Math.min(...apart));
  }

  select(row) {
    this.selected = row;
    this.surface.ask("draw");
  }

  key(key) {
    const by = { ArrowUp: -1, ArrowDown: 1 }[key];
    if (by) this.onSelect(Math.min(Math.max(this.selected + by, 0), this.data.rows.length - 1));
    return Boolean(by);
  }
}
