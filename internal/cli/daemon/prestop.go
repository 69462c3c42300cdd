package daemon

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/spf13/pflag"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/prestop"
	"github.com/fairlead/fairlead/internal/proxy"
	"github.com/fairlead/fairlead/internal/reflector"
)

// prestopFlags have a proxy answer the kubelet's preStop requests; only 'proxy' has them.
type prestopFlags struct {
	port uint16
	wait time.Duration
}

// add adds the flags.
func (f *prestopFlags) add(flags *pflag.FlagSet) {
	flags.Uint16Var(&f.port, "drain-port", 0,
		"port of Pods at which the kubelet asks this proxy, by the preStop hook of deploy/kubernetes/drain.yaml, when no node sends "+
			"a Pod new connections any more; 0 for none")
	flags.DurationVar(&f.wait, "drain-wait", 5*time.Second,
		"with --drain-port: how long an answer takes at most, and no longer than half of the Pod's grace period")
}

// check rejects flags that are wrong on any machine.
func (f *prestopFlags) check() error {
	if f.wait <= 0 || f.wait > time.Hour {
		return base.Usagef("--drain-wait is %s; want more than 0, and 1h at most", f.wait)
	}
	return nil
}

// open returns what answers at --drain-port, and has the options of the proxy tell it of EndpointSlices. Without a port it
// returns nil, and takes back what an earlier process with a port has done to the kernel.
func (f *prestopFlags) open(log *slog.Logger, o *proxy.Options, controlled func() bool) (*prestop.Server, error) {
	if f.port == 0 {
		if err := link.CloseInward(); err != nil {
			log.Debug("cannot remove what led preStop requests here", "err", err)
		}
		return nil, nil
	}
	if err := link.ProbeInward(); err != nil {
		return nil, fmt.Errorf("--drain-port needs nf_tables of the kernel, in every mode: %w", err)
	}
	s := prestop.New(prestop.Options{
		Client: o.Client, NodeName: o.NodeName, Port: f.port, Wait: f.wait, Controlled: controlled, Log: log,
	})
	follow := o.FollowSlices
	o.FollowSlices = func(to reflector.Sink[*discoveryv1.EndpointSlice]) reflector.Sink[*discoveryv1.EndpointSlice] {
		if follow != nil {
			to = follow(to)
		}
		return s.Follow(to)
	}
	return s, nil
}
