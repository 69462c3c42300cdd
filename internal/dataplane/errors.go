package dataplane

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/fairlead/fairlead/internal/table"
)

// maxErrors bounds how many errors the text of a joined one has.
const maxErrors = 10

// JoinErrors joins errors and keeps the text bounded.
func JoinErrors(errs []error) error {
	if n := len(errs) - maxErrors; n > 0 {
		errs = append(errs[:maxErrors:maxErrors], fmt.Errorf("and %d more", n))
	}
	return errors.Join(errs...)
}

// Rejected is the error of an Apply that wrote everything but some service ports,
// which are as they were before, or partly so.
type Rejected struct {
	// Ports has for each of them what is wrong with it. It is not empty.
	Ports map[table.Key]error
}

// Error returns what is wrong with each port, in the order of their names.
func (r *Rejected) Error() string { return JoinErrors(r.Unwrap()).Error() }

// Unwrap returns what is wrong with each port, in the order of their names.
func (r *Rejected) Unwrap() []error {
	var errs []error
	for _, k := range slices.SortedFunc(maps.Keys(r.Ports), compareKeys) {
		errs = append(errs, r.Ports[k])
	}
	return slices.CompactFunc(errs, errors.Is) // ports rejected together share an error
}

func compareKeys(a, b table.Key) int {
	if c := a.ID.Compare(b.ID); c != 0 {
		return c
	}
	return int(a.Family) - int(b.Family)
}

// Rejections collects what an Apply could not write. The zero value is empty.
type Rejections struct{ ports map[table.Key]error }

// Add rejects the port with key k. The first error of a port counts.
func (r *Rejections) Add(k table.Key, err error) {
	if r.ports == nil {
		r.ports = map[table.Key]error{}
	}
	if r.ports[k] == nil {
		r.ports[k] = err
	}
}

// Err is the error of an Apply whose other errors are errs: nil if there are
// none at all, a *Rejected if there are only rejected ports, else all of them
// joined in a way that hides the *Rejected, since then the caller knows nothing
// of the other ports.
func (r *Rejections) Err(errs ...error) error {
	switch {
	case len(r.ports) == 0:
		return JoinErrors(errs)
	case len(errs) == 0:
		return &Rejected{Ports: r.ports}
	}
	return JoinErrors(append(slices.Clip(errs), (&Rejected{Ports: r.ports}).Unwrap()...))
}

// joinFamilies is the error of an Apply whose address families returned errs: nil,
// a *Rejected with the ports of all of them, or, if any failed otherwise, all
// joined with nothing to be found by errors.As.
func joinFamilies(errs ...error) error {
	var all Rejections
	var others []error
	for _, err := range errs {
		var r *Rejected
		switch {
		case err == nil:
		case errors.As(err, &r):
			for k, why := range r.Ports {
				all.Add(k, why)
			}
		default:
			others = append(others, err)
		}
	}
	return all.Err(others...)
}
