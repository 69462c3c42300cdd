package shim

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/creack/pty"
)

// plumbing are the ends of a container's pipes or terminal.
type plumbing struct {
	childIn, childOut, childErr *os.File
	out, err                    *os.File // what the container writes; err nil with a terminal
	in                          io.WriteCloser
	term                        *os.File
	all                         []*os.File
}

func newPlumbing(c Container) (*plumbing, error) {
	p := &plumbing{}
	if err := p.open(c); err != nil {
		p.closeAll()
		return nil, fmt.Errorf("pipes of the container: %w", err)
	}
	c.give(p.childIn, p.childOut, p.childErr)
	return p, nil
}

func (p *plumbing) open(c Container) error {
	if c.TTY {
		master, slave, err := pty.Open()
		if err != nil {
			return fmt.Errorf("open a terminal: %w", err)
		}
		p.all = append(p.all, master, slave)
		p.childIn, p.childOut, p.childErr = slave, slave, slave
		p.out, p.term = master, master
		if c.Stdin {
			p.in = keepOpen{master}
		}
		return nil
	}
	r, w, err1 := os.Pipe()
	p.out, p.childOut = r, w
	r2, w2, err2 := os.Pipe()
	p.err, p.childErr = r2, w2
	var err3 error
	if c.Stdin {
		var in *os.File
		p.childIn, in, err3 = os.Pipe()
		p.in = in
		p.all = append(p.all, in)
	} else {
		p.childIn, err3 = os.Open(os.DevNull)
	}
	p.all = append(p.all, r, w, r2, w2, p.childIn)
	return errors.Join(err1, err2, err3)
}

// give makes the user of the container the owner of its ends of pipes or terminals, so
// that it can open /dev/stdout.
func (c Container) give(files ...*os.File) {
	var uid int
	switch {
	case c.Confinement != nil:
		uid = c.Confinement.Host(c.Confinement.UID)
	case c.User != nil:
		uid = int(*c.User)
	default:
		return
	}
	for _, f := range files {
		if f != nil && f.Name() != os.DevNull {
			_ = f.Chown(uid, -1) // not in a user namespace of one user
		}
	}
}

// keepOpen writes to a terminal whose Close leaves it open: the same file is read
// from.
type keepOpen struct{ f *os.File }

func (k keepOpen) Write(b []byte) (int, error) { return k.f.Write(b) }
func (k keepOpen) Close() error                { return nil }

// closeChild closes the child's ends, so that readers see the end of its output.
func (p *plumbing) closeChild() {
	for _, f := range []*os.File{p.childIn, p.childOut, p.childErr} {
		_ = f.Close()
	}
}

func (p *plumbing) readersDeadline(t time.Time) error {
	err := p.out.SetReadDeadline(t)
	if p.err != nil {
		err = errors.Join(err, p.err.SetReadDeadline(t))
	}
	return err
}

// closeAll closes every end; closing one again is harmless.
func (p *plumbing) closeAll() {
	for _, f := range p.all {
		if f != nil {
			_ = f.Close()
		}
	}
}
