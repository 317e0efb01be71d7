/* A place to draw on: a canvas at the screen's resolution, and one above it for what follows the pointer. */

/** Colours of the page's theme, read once per theme. */
const theme = {
  values: new Map(),
  parsed: new Map(),
  colour(name) {
    if (!this.values.has(name)) {
      this.values.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
    }
    return this.values.get(name);
  },
  /** [red, green, blue] of a colour. */
  channels(name) {
    if (!this.parsed.has(name)) {
      this.parsed.set(name, channelsOf(this.colour(name)));
    }
    return this.parsed.get(name);
  },
  forget() {
    this.values.clear();
    this.parsed.clear();
  },
};

/** [red, green, blue] of "#rrggbb". */
function channelsOf(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

const SANS = 'system-ui, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", Arial, sans-serif';

function font(size, weight = 400) {
  return `${weight} ${size}px ${SANS}`;
}

/** Pixels of a text that is `part` of the page's usual size, which grows with the window. */
function textSize(part) {
  return Math.round(parseFloat(getComputedStyle(document.documentElement).fontSize) * part);
}

class Surface {
  /** `draw` paints all, `mark` what follows the pointer. Both are called before the next frame when asked for. */
  constructor(host, { draw, mark }) {
    this.host = host;
    this.draw = draw;
    this.mark = mark;
    this.pending = { draw: false, mark: false };
    [this.canvas, this.overlay] = ["drawing", "overlay"].map((name) => {
      const canvas = document.createElement("canvas");
      canvas.className = name;
      canvas.setAttribute("aria-hidden", "true");
      return canvas;
    });
    this.sheet = document.createElement("div");
    this.sheet.className = "sheet";
    this.sheet.append(this.canvas, this.overlay);
    host.append(this.sheet);
    this.context = this.canvas.getContext("2d");
    this.marks = this.overlay.getContext("2d");
    this.width = this.height = 0;
  }

  /** Sets the size in CSS pixels. The drawing is gone after this. */
  resize(width, height) {
    this.ratio = window.devicePixelRatio || 1;
    this.width = width;
    this.height = height;
    this.sheet.style.width = `${width}px`;
    this.sheet.style.height = `${height}px`;
    for (const canvas of [this.canvas, this.overlay]) {
      canvas.width = Math.round(width * this.ratio);
      canvas.height = Math.round(height * this.ratio);
    }
    for (const context of [this.context, this.marks]) context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
  }

  ask(what) {
    if (!this.pending.draw && !this.pending.mark) requestAnimationFrame(() => this.paint());
    this.pending[what] = true;
  }

  paint() {
    const { draw, mark } = this.pending;
    this.pending = { draw: false, mark: false };
    if (draw) this.draw();
    if (draw || mark) this.mark();
  }

  clear(context) {
    context.clearRect(0, 0, this.width, this.height);
  }

  /** To the edge of a device pixel, so that boxes have sharp sides. */
  snap(position) {
    return Math.round(position * this.ratio) / this.ratio;
  }
}
