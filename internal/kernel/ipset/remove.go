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

// Present returns the sets that exist, in the network namespace of
// the calling thread. A kernel without sets has none.
func Present(names ...string) ([]string, error) {
	c, err := Dial()
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.Close() }()
	return c.present(names)
}

func (c *Conn) present(names []string) ([]string, error) {
	all, err := c.Names()
	if err != nil {
		if NotSupported(err) {
			return nil, nil
		}
		return nil, err
	}
	return slices.DeleteFunc(slices.Clone(names), func(n string) bool { return !slices.Contains(all, n) }), nil
}

// Remove removes the sets that exist, as Present finds them.
func Remove(ctx context.Context, names ...string) error {
	c, err := Dial()
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	if names, err = c.present(names); err != nil || len(names) == 0 {
		return err
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
