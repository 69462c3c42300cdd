package ipset

import (
	"context"
	"errors"
	"slices"
	"time"
)

// inUseFor is for how long Remove tries again where rules still name a set:
// nf_tables lets go of what rules named some time after they are gone.
const inUseFor = 10 * time.Second

// Remove removes those of the sets that are there, in the network namespace of
// the calling thread. Where there are none, or the kernel has no sets at all, it
// does nothing.
func Remove(ctx context.Context, names ...string) error {
	c, err := Dial()
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	there, err := c.Names()
	if NotSupported(err) {
		return nil
	}
	if err != nil {
		return err
	}
	names = slices.DeleteFunc(slices.Clone(names), func(n string) bool { return !slices.Contains(there, n) })
	if len(names) == 0 {
		return nil
	}
	until := time.Now().Add(inUseFor)
	for {
		err := c.Destroy(names...)
		if !errors.Is(err, ErrInUse) || time.Now().After(until) {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
}
