/* One number per rank: blocks by DP (downwards) and PP (to the right), in a block CP downwards and TP to the right. */

/* From low to high: matplotlib's viridis at nine places. It is read alike by everyone, also in grey. */
const HEAT = ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725"];
const SHADES = 256;
const WANTED_HEIGHT = 460; // pixels; ranks of many DP groups are laid out side by side to keep to it
const LARGEST_CELL = 40;
const SMALLEST_CELL = 2;
const TOP = 28; // for the labels of PP
const BAND_GAP = 22;

/** HEAT as [red, green, blue] in 256 steps. */
function heatColours() {
  const anchors = HEAT.map(channelsOf);
  return Array.from({ length: SHADES }, (_, shade) => {
    const at = (shade / (SHADES - 1)) * (anchors.length - 1);
    const low = Math.min(Math.floor(at), anchors.length - 2);
    return [0, 1, 2].map((c) => Math.round(anchors[low][c] + (anchors[low + 1][c] - anchors[low][c]) * (at - low)));
  });
}

class HeatMap {
  constructor(host, scale, data, bytes) {
    Object.assign(this, { host, data });
    this.values = readColumn(bytes, data.values);
    [this.dp, this.pp, this.cp, this.tp] = data.shape;
    this.colours = [...heatColours(), ...["below", "above"].map((name) => theme.channels(name))];
    [this.low, this.high] = [data.low, data.high];
    this.showScale(scale);
    this.hovered = -1;
    this.surface = new Surface(host, { draw: () => this.draw(), mark: () => this.mark() });
    host.addEventListener("pointermove", (event) => {
      const place = host.getBoundingClientRect();
      this.show(this.rankAt(event.clientX - place.left + host.scrollLeft, event.clientY - place.top), event);
    });
    host.addEventListener("pointerleave", () => this.show(-1));
    host.addEventListener("keydown", (event) => this.key(event));
  }

  showScale(scale) {
    const { unit } = this.data;
    const [below, low, bar, high, above] = scale.children;
    scale.hidden = this.values.every(Number.isNaN);
    low.textContent = quantity(this.low, unit);
    high.textContent = this.high > this.low ? quantity(this.high, unit) : "";
    bar.style.background = `linear-gradient(to right, ${HEAT.join(", ")})`;
    bar.hidden = !(this.high > this.low);
    const ends = [
      [below, (value) => value < this.low, "down", "below"],
      [above, (value) => value > this.high, "up", "above"],
    ];
    for (const [place, isOut, direction, name] of ends) {
      const out = this.values.filter(isOut);
      place.hidden = !out.length;
      if (!out.length) continue;
      const furthest = out.reduce(direction === "up" ? (a, b) => Math.max(a, b) : (a, b) => Math.min(a, b));
      const ranks = out.length === 1 ? "1 rank: " : `${out.length} ranks, ${direction} to `;
      place.replaceChildren(make("span", `${ranks}${quantity(furthest, unit)}`, theme.colour(name)));
    }
  }

  /** Where everything is, for a width: how many bands the DP groups are laid side by side in, how large a cell is. */
  place(width) {
    const ratio = window.devicePixelRatio || 1;
    const number = 11 * String(this.dp - 1).length;
    const columns = this.pp * this.tp;
    const plan = (bands) => {
      const perBand = Math.ceil(this.dp / bands);
      // Bands of one block are narrow: there is only room for a number above each.
      const [labels, gap] = this.pp > 1 || bands <= 4 ? [16 + number, BAND_GAP] : [0, 12];
      const across = ((width - bands * (labels + gap)) / bands - (this.pp - 1) * 2) / columns;
      const down = WANTED_HEIGHT / (perBand * this.cp);
      const cell = Math.min(across, down, LARGEST_CELL);
      return { bands: Math.ceil(this.dp / perBand), perBand, labels, gap, across, cell };
    };
    const plans = Array.from({ length: Math.min(this.dp, 64) }, (_, i) => plan(i + 1));
    let best = plans.reduce((a, b) => (b.cell > a.cell * 1.001 ? b : a));
    // Where cells would be too small, the map becomes taller instead.
    if (best.cell < SMALLEST_CELL) best = plans.findLast(({ across }) => across >= SMALLEST_CELL) ?? plans[0];
    const wanted = Math.max(best.cell, Math.min(best.across, SMALLEST_CELL));
    this.cell = Math.max(Math.floor(wanted * ratio), 1) / ratio;
    this.line = this.cell >= 6 ? 2 : 1; // between blocks
    // A line between DP groups, where they are but a row high between every eight: cells have lines of their own.
    this.every = this.cp > 1 ? 1 : 8;
    Object.assign(this, { labels: best.labels, bands: best.bands, perBand: best.perBand });
    this.bandWidth = Math.max(columns * this.cell + (this.pp - 1) * this.line, best.labels ? 0 : number);
    this.pitch = this.labels + this.bandWidth + best.gap;
    this.width = Math.max(width, this.bands * this.pitch);
    const lines = Math.floor((this.perBand - 1) / this.every);
    this.height = TOP + this.perBand * this.cp * this.cell + lines * this.line + 4;
  }

  resize() {
    this.place(this.host.clientWidth);
    this.host.style.height = `${this.height}px`;
    this.surface.resize(this.width, this.height);
    this.surface.ask("draw");
  }

  left(band) {
    return band * this.pitch + this.labels;
  }

  /** The top left corner of a rank's cell. */
  corner(rank) {
    const [dp, pp, cp, tp] = this.coordinates(rank);
    const row = dp % this.perBand;
    return [
      this.left(Math.floor(dp / this.perBand)) + pp * (this.tp * this.cell + this.line) + tp * this.cell,
      TOP + Math.floor(row / this.every) * this.line + (row * this.cp + cp) * this.cell,
    ];
  }

  /** rank = tp + TP (cp + CP (pp + PP dp)) */
  coordinates(rank) {
    const [tp, rest] = [rank % this.tp, Math.floor(rank / this.tp)];
    const [cp, block] = [rest % this.cp, Math.floor(rest / this.cp)];
    return [Math.floor(block / this.pp), block % this.pp, cp, tp];
  }

  rank(dp, pp, cp, tp) {
    return tp + this.tp * (cp + this.cp * (pp + this.pp * dp));
  }

  /** The rank at a place, -1 where there is none. */
  rankAt(x, y) {
    const band = Math.floor(x / this.pitch);
    const across = x - this.left(band);
    const pp = Math.floor(across / (this.tp * this.cell + this.line));
    const tp = Math.floor((across - pp * (this.tp * this.cell + this.line)) / this.cell);
    const group = this.every * this.cp * this.cell + this.line; // the height of DP groups up to a line
    const groups = Math.floor((y - TOP) / group);
    const rows = Math.floor((y - TOP - groups * group) / this.cell);
    const row = groups * this.every + Math.floor(rows / this.cp);
    const dp = band * this.perBand + row;
    const outside = across < 0 || pp >= this.pp || tp >= this.tp || y < TOP || rows >= this.every * this.cp;
    if (outside || band >= this.bands || row >= this.perBand || dp >= this.dp) return -1;
    return this.rank(dp, pp, rows % this.cp, tp);
  }

  /** The index of a colour: of the scale, or one of the two after it. */
  shade(value) {
    if (value < this.low) return SHADES;
    if (value > this.high) return SHADES + 1;
    if (this.high === this.low) return SHADES >> 1;
    return Math.round(((value - this.low) / (this.high - this.low)) * (SHADES - 1));
  }

  draw() {
    const { context } = this.surface;
    this.surface.clear(context);
    this.drawCells();
    context.font = font(textSize(0.8));
    context.fillStyle = theme.colour("quiet");
    for (let band = 0; band < this.bands; band++) this.drawLabels(context, band);
    for (const where of this.data.marked) this.ring(context, this.rank(...where));
    Object.assign(this.host.dataset, { cell: this.cell, left: this.labels, top: TOP });
  }

  /** Pixel by pixel: a hundred thousand rectangles would take a hundred times as long. */
  drawCells() {
    const { canvas, context, ratio } = this.surface;
    const image = context.createImageData(canvas.width, canvas.height);
    const pixels = new Uint32Array(image.data.buffer);
    // Red is the first byte of a pixel, and so the lowest of a little-endian number.
    const colours = this.colours.map(([red, green, blue]) => (255 << 24) | (blue << 16) | (green << 8) | red);
    const size = Math.round(this.cell * ratio);
    const inner = size >= 4 ? size - 1 : size; // a line between cells that are large enough
    for (let rank = 0; rank < this.values.length; rank++) {
      if (Number.isNaN(this.values[rank])) continue;
      const [x, y] = this.corner(rank).map((at) => Math.round(at * ratio));
      const colour = colours[this.shade(this.values[rank])];
      for (let line = 0; line < inner; line++) {
        const start = (y + line) * canvas.width + x;
        pixels.fill(colour, start, start + inner);
      }
    }
    context.putImageData(image, 0, 0);
  }

  /** The numbers of PP groups above a band and of DP groups beside it, as many as there is room for. */
  drawLabels(context, band) {
    const first = band * this.perBand;
    const last = Math.min(first + this.perBand, this.dp);
    const block = this.tp * this.cell + this.line;
    context.textBaseline = "alphabetic";
    if (!this.labels) {
      context.textAlign = "left";
      context.fillText(String(first), this.left(band), TOP - 7);
      return;
    }
    context.textAlign = "right";
    context.fillText("dp", this.left(band) - 6, TOP - 7);
    context.textAlign = "center";
    context.fillText("pp", this.left(band) + this.bandWidth + 11, TOP - 7);
    const everyPp = roundUp(28 / block);
    for (let pp = 0; pp < this.pp; pp += everyPp) {
      const [x] = this.corner(this.rank(first, pp, 0, 0));
      context.fillText(String(pp), x + (block - this.line) / 2, TOP - 7);
    }
    context.textAlign = "right";
    context.textBaseline = "middle";
    const everyDp = roundUp(18 / (this.cp * this.cell));
    for (let dp = first; dp < last; dp += everyDp) {
      const [x, y] = this.corner(this.rank(dp, 0, 0, 0));
      context.fillText(String(dp), x - 6, y + Math.max((this.cp * this.cell) / 2, 6));
    }
  }

  /** A ring around a small cell, a frame around a large one; of two colours, one of which is seen on any ground. */
  ring(context, rank) {
    const [x, y] = this.corner(rank);
    const half = this.cell / 2;
    for (const [width, colour] of [[5, theme.colour("paper")], [2.5, theme.colour("alarm")]]) {
      context.beginPath();
      if (this.cell > 16) context.rect(x, y, this.cell, this.cell);
      else context.arc(x + half, y + half, 8, 0, 7);
      context.lineWidth = width;
      context.strokeStyle = colour;
      context.stroke();
    }
  }

  mark() {
    const context = this.surface.marks;
    this.surface.clear(context);
    if (this.hovered < 0) return;
    const [x, y] = this.corner(this.hovered);
    for (const [width, colour] of [[4, theme.colour("paper")], [2, theme.colour("ink")]]) {
      context.lineWidth = width;
      context.strokeStyle = colour;
      context.strokeRect(x - 1, y - 1, this.cell + 2, this.cell + 2);
    }
  }

  /** Shows which rank is under the pointer, or under the keys' cursor. */
  show(rank, pointer = null) {
    if (rank !== this.hovered) this.surface.ask("mark");
    this.hovered = rank;
    if (rank < 0) return tip.hide();
    const place = this.host.getBoundingClientRect();
    const [x, y] = this.corner(rank);
    const [dp, pp, cp, tp] = this.coordinates(rank);
    tip.show(pointer?.clientX ?? place.left + x, pointer?.clientY ?? place.top + y, {
      title: `rank ${rank}`,
      words: quantity(this.values[rank], this.data.unit),
      lines: [["dp", String(dp)], ["pp", String(pp)], ["cp", String(cp)], ["tp", String(tp)]],
    });
  }

  /** Arrows go by one in TP and PP, and by one in CP and DP. */
  key(event) {
    const [dp, pp, cp, tp] = this.coordinates(Math.max(this.hovered, 0));
    let [across, down] = [pp * this.tp + tp, dp * this.cp + cp];
    if (event.key === "ArrowRight") across = Math.min(across + 1, this.pp * this.tp - 1);
    else if (event.key === "ArrowLeft") across = Math.max(across - 1, 0);
    else if (event.key === "ArrowDown") down = Math.min(down + 1, this.dp * this.cp - 1);
    else if (event.key === "ArrowUp") down = Math.max(down - 1, 0);
    else return event.key === "Escape" && this.show(-1);
    event.preventDefault();
    const divide = (value, by) => [Math.floor(value / by), value % by];
    const [[ppTo, tpTo], [dpTo, cpTo]] = [divide(across, this.tp), divide(down, this.cp)];
    return this.show(this.rank(dpTo, ppTo, cpTo, tpTo));
  }
}

/** The next power of two: steps between labels. */
function roundUp(least) {
  return 2 ** Math.max(0, Math.ceil(Math.log2(least)));
}
