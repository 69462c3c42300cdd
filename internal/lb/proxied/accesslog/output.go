package accesslog

import (
	"io"
	"sync"
	"sync/atomic"
	"time"
)

// Standard is the name of a directory that stands for the standard output.
const Standard = "-"

// maxWaiting bounds the lines that wait for a slow reader of the output: more are dropped, since no request waits for it.
const maxWaiting = 4096

// lastWrites is how long the end waits for a reader that takes nothing: the process must not stay because of it.
const lastWrites = time.Second

// output writes lines to a stream.
type output struct {
	lines   chan string
	done    chan struct{} // closed when all is written
	once    sync.Once
	stop    chan struct{}
	dropped atomic.Uint64
}

// newOutput starts to write to w.
func newOutput(w io.Writer) *output {
	o := &output{lines: make(chan string, maxWaiting), stop: make(chan struct{}), done: make(chan struct{})}
	go func() {
		defer close(o.done)
		for {
			select {
			case line := <-o.lines:
				_, _ = io.WriteString(w, line)
			case <-o.stop:
				o.drain(w)
				return
			}
		}
	}()
	return o
}

// drain writes what waits.
func (o *output) drain(w io.Writer) {
	for {
		select {
		case line := <-o.lines:
			_, _ = io.WriteString(w, line)
		default:
			return
		}
	}
}

// write has a line written, or drops it.
func (o *output) write(line string) {
	select {
	case o.lines <- line:
	default:
		o.dropped.Add(1)
	}
}

// close writes what waits, as far as the reader takes it within lastWrites, and ends.
func (o *output) close() {
	o.once.Do(func() { close(o.stop) })
	select {
	case <-o.done:
	case <-time.After(lastWrites):
	}
}
