/* Boxes as columns, row by row in order of time. */

class Boxes {
  constructor(data, columns, bytes) {
    Object.assign(this, readColumns(bytes, columns));
    this.kinds = data.kinds;
    this.pp = data.pp;
    this.rows = data.rows.length;
    // Boxes of a row do not overlap, but messages may: how far before a time one can start that lasts until then.
    this.longest = 0;
    for (let i = 0; i < this.start.length; i++) this.longest = Math.max(this.longest, this.end[i] - this.start[i]);
    this.byMicroBatch = null;
    // Of each box, which of the theme's colours.
    this.names = this.kinds.flatMap(({ name }) => Array.from({ length: data.chunks }, (_, i) => `${name}-${i}`));
    this.shade = Uint16Array.from(this.kind, (kind, i) => kind * data.chunks + Math.min(this.chunk(i), data.chunks - 1));
  }

  has(names) {
    return this.kind.some((kind) => names.includes(this.kinds[kind].name));
  }

  kindName(i) {
    return this.kinds[this.kind[i]].name;
  }

  chunk(i) {
    return Math.max(0, Math.floor(this.stage[i] / this.pp));
  }

  colour(i) {
    return theme.colour(this.names[this.shade[i]]);
  }

  channels(i) {
    return theme.channels(this.names[this.shade[i]]);
  }

  ink(i) {
    return theme.colour(`${this.names[this.shade[i]]}-ink`);
  }

  /** As schedules write it: 3F7, 3GATHER. */
  action(i) {
    const [stage, batch] = [this.stage[i], this.microBatch[i]];
    return `${stage < 0 ? "" : stage}${this.kindName(i)}${batch < 0 ? "" : batch}`;
  }

  /** In a box: the micro-batch, or what it is that belongs to none. */
  label(i) {
    return this.microBatch[i] < 0 ? this.kindName(i) : String(this.microBatch[i]);
  }

  /** Whether two boxes are parts of one action on a micro-batch. */
  sameAction(i, j) {
    const same = this.kind[i] === this.kind[j] && this.stage[i] === this.stage[j];
    return same && this.microBatch[i] === this.microBatch[j] && this.microBatch[i] >= 0;
  }

  /** Of a row, the letters of the longest number in a box. */
  widestLabel(row) {
    let most = 0;
    for (let i = this.first[row]; i < this.first[row + 1]; i++) {
      if (this.microBatch[i] >= 0) most = Math.max(most, this.label(i).length);
    }
    return most;
  }

  rowOf(i) {
    let row = 0;
    while (this.first[row + 1] <= i) row++;
    return row;
  }

  words(i) {
    const [stage, batch] = [this.stage[i], this.microBatch[i]];
    const where = stage < 0 ? "" : ` of stage ${stage} (chunk ${this.chunk(i)})`;
    return `${this.kinds[this.kind[i]].words}${where}${batch < 0 ? "" : `, micro-batch ${batch}`}`;
  }

  /** The first box of a row that may end after a time; the row's end if none does. */
  firstAfter(row, time) {
    let [low, high] = [this.first[row], this.first[row + 1]];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.start[middle] < time - this.longest) low = middle + 1;
      else high = middle;
    }
    while (low < this.first[row + 1] && this.end[low] < time && this.start[low] < time) low++;
    return low;
  }

  /** The box of a row at a time, of some kinds or of any; -1: none. */
  at(row, time, kinds = null) {
    for (let i = this.firstAfter(row, time); i < this.first[row + 1] && this.start[i] <= time; i++) {
      if (time < this.end[i] && (!kinds || kinds.includes(this.kindName(i)))) return i;
    }
    return -1;
  }

  /** The empty stretch of a row at a time: {from, to, next}, next being the box after it or -1. */
  gap(row, time, span) {
    let [from, next] = [0, -1];
    for (let i = this.first[row]; i < this.first[row + 1] && next < 0; i++) {
      if (this.start[i] > time) next = i;
      else from = Math.max(from, this.end[i]);
    }
    return { from, to: next < 0 ? span : this.start[next], next };
  }

  /** The empty stretches of a row of which at least `least` lies within what `frame` shows. */
  gaps(row, frame, least) {
    const found = [];
    const seen = (from, to) => Math.min(to, frame.to) - Math.max(from, frame.from);
    let until = 0;
    for (let i = this.first[row]; i < this.first[row + 1] && until < frame.to; i++) {
      if (seen(until, this.start[i]) >= least) found.push({ from: until, to: this.start[i] });
      until = Math.max(until, this.end[i]);
    }
    if (seen(until, frame.span) >= least) found.push({ from: until, to: frame.span });
    return found;
  }

  /** How long a row does nothing from 0 to the end of the step. */
  idle(row, span) {
    let [idle, until] = [0, 0];
    for (let i = this.first[row]; i < this.first[row + 1]; i++) {
      idle += Math.max(0, this.start[i] - until);
      until = Math.max(until, this.end[i]);
    }
    return idle + Math.max(0, span - until);
  }

  /** [box, row] of every box of a micro-batch. */
  ofMicroBatch(batch) {
    if (!this.byMicroBatch) {
      this.byMicroBatch = new Map();
      for (let row = 0; row < this.rows; row++) {
        for (let i = this.first[row]; i < this.first[row + 1]; i++) {
          const boxes = this.byMicroBatch.get(this.microBatch[i]);
          if (boxes) boxes.push([i, row]);
          else this.byMicroBatch.set(this.microBatch[i], [[i, row]]);
        }
      }
    }
    return this.byMicroBatch.get(batch) ?? [];
  }
}
