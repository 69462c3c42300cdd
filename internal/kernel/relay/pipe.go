package relay

import "golang.org/x/sys/unix"

const (
	// pipeSize is asked for each pipe; unprivileged users get it until all of
	// theirs together have 64 MiB (fs.pipe-user-pages-soft).
	pipeSize = 1 << 20
	// maxFree bounds the pipes that a thread keeps for the next connection.
	maxFree = 32
)

// pipe is what bytes are spliced through. It is empty while no flow holds it.
type pipe struct{ r, w int }

// pipe borrows a pipe. There may be none, for want of files: half of them are for connections alone, which need no pipe.
func (w *worker) pipe() (p pipe, ok bool) {
	if n := len(w.pipes); n > 0 {
		p = w.pipes[n-1]
		w.pipes = w.pipes[:n-1]
		return p, true
	}
	if w.engine.count.files.Load() > int64(w.engine.cfg.MaxFiles/2) || !w.room(2) {
		return pipe{}, false
	}
	var fds [2]int
	if unix.Pipe2(fds[:], unix.O_NONBLOCK|unix.O_CLOEXEC) != nil {
		w.leave(2)
		return pipe{}, false
	}
	_, _ = unix.FcntlInt(uintptr(fds[1]), unix.F_SETPIPE_SZ, pipeSize) // the default is slower, but works
	w.engine.count.pipes.Add(1)
	return pipe{r: fds[0], w: fds[1]}, true
}

// giveBack returns a pipe, which is used again if it is empty.
func (w *worker) giveBack(p pipe, empty bool) {
	if empty && len(w.pipes) < maxFree && !w.paused {
		w.pipes = append(w.pipes, p)
		return
	}
	w.closePipe(p)
}

func (w *worker) closePipe(p pipe) {
	_ = unix.Close(p.r)
	_ = unix.Close(p.w)
	w.leave(2)
	w.engine.count.pipes.Add(-1)
}

func (w *worker) closePipes() {
	for _, p := range w.pipes {
		w.closePipe(p)
	}
	w.pipes = nil
}
