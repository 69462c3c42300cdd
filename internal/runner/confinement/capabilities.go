package confinement

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/kernel/confine"
	"github.com/fairlead/fairlead/internal/runner/shim"
)

// capabilities sets the capabilities of w: the runtimes' default, or all for a container that is not confined, without
// the dropped ones, and with the added ones, which other users than root have at once.
func capabilities(w *shim.Confinement, r *request) error {
	all := confine.AllCapabilities() // in its own user namespace
	names := confine.DefaultCapabilities()
	if !r.confined {
		held, err := confine.HeldCapabilities()
		if err != nil {
			return err
		}
		all, names = held, held
	}
	names = slices.Clone(names)
	c := r.Capabilities
	if c == nil {
		c = &corev1.Capabilities{}
	}
	w.AllCapabilities = !r.confined && len(c.Add)+len(c.Drop) == 0 || isTrue(r.Privileged)
	for _, d := range c.Drop {
		d := strings.TrimPrefix(strings.ToUpper(string(d)), "CAP_")
		if d == "ALL" {
			names = nil
			continue
		}
		if _, err := confine.Capability(d); err != nil {
			return err
		}
		names = slices.DeleteFunc(names, func(n string) bool { return n == d })
	}
	for _, a := range c.Add {
		if strings.EqualFold(string(a), "ALL") {
			names = slices.Clone(all)
			continue
		}
		n, err := confine.Capability(string(a))
		if err != nil {
			return err
		}
		name := strings.TrimPrefix(strings.ToUpper(string(a)), "CAP_")
		if !slices.Contains(all, name) {
			return fmt.Errorf("the agent does not have %s itself", confine.CapabilityName(n))
		}
		w.Ambient, names = append(w.Ambient, n), append(names, name)
	}
	for _, n := range names {
		if i, err := confine.Capability(n); err == nil && !slices.Contains(w.Bounding, i) {
			w.Bounding = append(w.Bounding, i)
		}
	}
	return nil
}
