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

// pipes are the pipes that a thread keeps for the next connection.
type pipes struct {
	w    *worker
	free []pipe
}

// take borrows a pipe. There is none if more than half of the files are in use:
// the other half is only for connections, which work without pipes.
func (s *pipes) take() (p pipe, ok bool) {
	if n := len(s.free); n > 0 {
		p = s.free[n-1]
		s.free = s.free[:n-1]
		return p, true
	}
	if s.w.engine.count.files.Load() > int64(s.w.engine.cfg.MaxFiles/2) || !s.w.room(2) {
		return pipe{}, false
	}
	var fds [2]int
	if unix.Pipe2(fds[:], unix.O_NONBLOCK|unix.O_CLOEXEC) != nil {
		s.w.leave(2)
		return pipe{}, false
	}
	_, _ = unix.FcntlInt(uintptr(fds[1]), unix.F_SETPIPE_SZ, pipeSize) // the default is slower, but works
	s.w.engine.count.pipes.Add(1)
	return pipe{r: fds[0], w: fds[1]}, true
}

// giveBack returns a pipe, which is used again if it is empty.
func (s *pipes) giveBack(p pipe, empty bool) {
	if empty && len(s.free) < maxFree && !s.w.paused {
		s.free = append(s.free, p)
		return
	}
	s.close(p)
}

func (s *pipes) close(p pipe) {
	_ = unix.Close(p.r)
	_ = unix.Close(p.w)
	s.w.leave(2)
	s.w.engine.count.pipes.Add(-1)
}

func (s *pipes) closeAll() {
	for _, p := range s.free {
		s.close(p)
	}
	s.free = nil
}
