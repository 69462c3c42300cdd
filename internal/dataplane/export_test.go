package dataplane

import "github.com/fairlead/fairlead/internal/table"

// What tests of the package itself use; they import testbed/flows, which imports
// this package.

var JoinFamilies = joinFamilies

func (p *Plan) Update(t *table.Table, keys []table.Key, dirty Dirty, rejected *Rejections) []table.Key {
	return p.update(t, keys, dirty, rejected)
}

func (p *Plan) ChangeOf(dirty Dirty) *Change { return &Change{Plan: p, Dirty: dirty} }

func (c *Change) RejectedPorts() map[table.Key]error { return c.rejected.ports }

func (c *Change) Errs() []error { return c.errs }
