package offline

import (
	"os"
	"sync"
)

// syncer has files written to the disk, one at a time: nothing waits for it but the end, and without it a crash of the machine
// costs what was last written. A disk that is slow gets each file's newest state once.
type syncer struct {
	mu      sync.Mutex
	running sync.WaitGroup
	busy    bool
	closed  bool
	dirty   map[string]bool // by path
}

// soon has a file written to the disk.
func (s *syncer) soon(path string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	if s.dirty == nil {
		s.dirty = map[string]bool{}
	}
	s.dirty[path] = true
	if !s.busy {
		s.busy = true
		s.running.Go(s.run)
	}
}

// close waits until all that came before is on the disk.
func (s *syncer) close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.running.Wait()
}

func (s *syncer) run() {
	for {
		path, ok := s.next()
		if !ok {
			return
		}
		if f, err := os.Open(path); err == nil { // else it was removed
			_ = f.Sync()
			_ = f.Close()
		}
	}
}

// next returns a file that must be written.
func (s *syncer) next() (string, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for path := range s.dirty {
		delete(s.dirty, path)
		return path, true
	}
	s.busy = false
	return "", false
}
