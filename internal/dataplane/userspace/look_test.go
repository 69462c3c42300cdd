package userspace

import (
	"testing"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// What is read back of single frontends is what the Table has, in every state that this mode can carry.
func TestLook(t *testing.T) {
	flows.Looks(t, flows.States(1)[:12], func(t testing.TB, f func(p dataplane.Applier)) {
		testbed.NewNetwork(t).Outside("host").Do(func() {
			p := open(t, Config{Drain: -1})
			defer func() {
				if err := p.Close(); err != nil {
					t.Error(err)
				}
			}()
			f(p)
		})
	})
}
