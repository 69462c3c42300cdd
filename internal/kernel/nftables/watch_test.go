package nftables

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/fairlead/fairlead/internal/testbed"
)

// Watch reports what others do to the tables of its name, of any family; neither
// what its own Conn does nor what happens to other tables.
func TestWatchReportsOthersAlone(t *testing.T) {
	dial(t, func(c *Conn) {
		var calls atomic.Int64
		if err := c.Watch(mine.Name, func() { calls.Add(1) }); err != nil {
			t.Fatal(err)
		}
		other, err := Dial()
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = other.Close() }()
		commit := func(by *Conn, fill func(*Batch)) {
			t.Helper()
			b := NewBatch()
			fill(b)
			if err := by.Commit(b); err != nil {
				t.Fatal(err)
			}
		}
		commit(c, func(b *Batch) { b.AddTable(mine, "") })
		commit(other, func(b *Batch) { b.AddTable(Table{Family: IPv4, Name: "theirs"}, "") })
		commit(c, func(b *Batch) { b.AddChain(mine, Chain{Name: "a"}) })
		failing := NewBatch()
		failing.DelChain(mine, "missing")
		if err := c.Commit(failing); !IsConflict(err) {
			t.Fatalf("removal of a missing chain: %v", err)
		}
		for i, change := range []func(*Batch){
			func(b *Batch) { b.AddChain(mine, Chain{Name: "foreign"}) },
			func(b *Batch) { b.AddTable(Table{Family: IPv6, Name: mine.Name}, "") },
			func(b *Batch) { b.DelTable(mine) },
		} {
			commit(other, change)
			testbed.Until(t, "a notification", func() error {
				if n := calls.Load(); n < int64(i+1) {
					return fmt.Errorf("%d notifications", n)
				}
				return nil
			})
			// They come in order: one of an earlier change would have come before.
			if n := calls.Load(); n != int64(i+1) {
				t.Errorf("%d notifications of %d changes by others", n, i+1)
			}
		}
		// A change by another Conn while notifications are off is counted.
		err = c.Unwatched(1, func() error {
			b := NewBatch()
			b.AddTable(mine, "")
			return errors.Join(other.Commit(b), errors.New("nothing of our own"))
		})
		if err == nil || calls.Load() < 4 {
			t.Errorf("%v, %d notifications after a change during a commit", err, calls.Load())
		}
	})
}
