package podnet

import (
	"errors"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/kernel/link"
)

// target is a part of the kernel's state that Network keeps in line with a plan. It remembers what it has written, as
// the targets of package dataplane do. Only the goroutine of Network.Run uses it.
type target interface {
	// forget has the next write compare everything with the kernel.
	forget()
	// write brings the kernel in line with p. It may be called again after an error.
	write(p *plan) error
	close() error
}

// targets are all targets in the order of their writes.
func (n *Network) targets() []target { return []target{n.device, n.masquerade, n.carrier, n.routes} }

// device holds the node's own addresses among its Pods.
type device struct {
	name    string
	barrier *routes
	written []netip.Addr
}

// pending reports whether write has something to do.
func (d *device) pending(p *plan) bool {
	return len(d.written) == 0 || !slices.Equal(d.written, p.gateways)
}

// forget does nothing: nothing but the node's ranges changes the device.
func (*device) forget() {}

func (*device) close() error { return nil }

func (d *device) write(p *plan) error {
	if !d.pending(p) {
		return nil
	}
	if err := errors.Join(d.barrier.failClosed(), link.EnsureNode(d.name, p.gateways)); err != nil {
		return err
	}
	d.written = p.gateways
	return nil
}

// routes are the routes to ranges of Pods. What it has found out of the machine's routes is kept until forget.
type routes struct {
	kernel  link.Routes
	paths   *paths
	carrier carrier
}

func (r *routes) forget() {
	r.kernel.Forget()
	r.paths.forget()
}

func (*routes) close() error { return nil }

// decide sets how p leads to the Pods of each other node, or why it does not.
func (r *routes) decide(p *plan, allowed ranges) {
	p.direct, p.peers, p.problems = allowed.routes(p.own, p.others, r.paths)
}

func (r *routes) write(p *plan) error {
	failed, err := r.kernel.Set(append(p.direct, p.carried...))
	errs := []error{err}
	for _, c := range p.own.cidrs {
		errs = append(errs, failed[c])
	}
	for _, o := range p.others {
		for _, c := range o.cidrs {
			if err := failed[c]; err != nil && p.problems[o.name] == "" {
				p.problems[o.name] = err.Error()
			}
		}
	}
	return errors.Join(errs...)
}

// failClosed keeps packets to Pods of other nodes from leaving in plain text before the nodes are known.
func (r *routes) failClosed() error {
	if closed := r.carrier.unreachable(); len(closed) > 0 {
		return r.kernel.Add(closed)
	}
	return nil
}
