package nftables

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netlink"
)

// Conn is a connection to nf_tables of one network namespace: that of the
// thread which called Dial. One goroutine uses it at a time.
type Conn struct {
	nl    *netlink.Conn
	max   int
	watch *watch // nil without Watch
}

// Dial opens a connection.
func Dial() (*Conn, error) {
	c, err := netlink.Dial()
	if err != nil {
		return nil, err
	}
	return &Conn{nl: c, max: c.MaxMessage()}, nil
}

// Close releases the connection and ends Watch.
func (c *Conn) Close() error {
	var err error
	if c.watch != nil {
		err = c.watch.close()
	}
	return errors.Join(err, c.nl.Close())
}

// MaxBatch is how many bytes a transaction may have.
func (c *Conn) MaxBatch() int { return c.max }

// Refusal is the error of a transaction that the kernel did not accept. Nothing
// of it was done.
type Refusal struct {
	// Tags are the causes (Batch.Tag) of the rejected messages, each once; empty
	// if the kernel did not blame a message with a tag.
	Tags []any
	errs []error
}

// Error returns the first of the kernel's reasons and how many there were.
func (r *Refusal) Error() string {
	if len(r.errs) > 1 {
		return fmt.Sprintf("nf_tables rejected the change: %v (and %d more)", r.errs[0], len(r.errs)-1)
	}
	return fmt.Sprintf("nf_tables rejected the change: %v", r.errs[0])
}

// Unwrap returns the kernel's reasons.
func (r *Refusal) Unwrap() []error { return r.errs }

// transient are errors that mean nothing for the transaction: another
// program's change came between, or a signal did.
func transient(err error) bool {
	return errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.ERESTART)
}

// IsConflict reports whether err is of a transaction that did not fit the installed rules:
// something it removes is missing, something it adds is there already, or what it
// removes is in use.
func IsConflict(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EEXIST) || errors.Is(err, unix.EBUSY)
}

const attempts = 10

// Commit makes the kernel carry out the transaction, or returns a *Refusal.
// The batch cannot be used afterwards.
func (c *Conn) Commit(b *Batch) error {
	if c.watch == nil {
		return c.commit(b)
	}
	return c.unwatched(1, func() error { return c.commit(b) })
}

func (c *Conn) commit(b *Batch) error {
	buf := b.finish()
	if len(buf) > c.max {
		return &Refusal{errs: []error{
			fmt.Errorf("a change of %d bytes is more than this process may send at once (%d): raise net.core.wmem_max: %w", len(buf), c.max,
				unix.EMSGSIZE)}}
	}
	for try := 1; ; try++ {
		errs := c.nl.Send(buf)
		if len(errs) == 0 {
			return nil
		}
		if transient(errs[0]) && try < attempts {
			continue
		}
		r := &Refusal{errs: errs}
		seen := map[any]bool{nil: true}
		for _, err := range errs {
			var e *netlink.Error
			if errors.As(err, &e) && e.Index >= 0 && e.Index < len(b.tags) && !seen[b.tags[e.Index]] {
				seen[b.tags[e.Index]] = true
				r.Tags = append(r.Tags, b.tags[e.Index])
			}
		}
		return r
	}
}
