package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"
)

// runLB runs 'fairlead lb' in the place of MetalLB: on kube-apiserver and beside kube-proxy, with
// the rights of the document. When the kube-proxy of a node ends, its addresses move.
func (b *bench) runLB(ctx context.Context) (figures []figure, err error) {
	dir, err := os.MkdirTemp(b.dir, "lb-api-")
	if err != nil {
		return nil, err
	}
	k, err := startKubernetes(ctx, dir, b.peers, "--bind-address", "0.0.0.0", "--advertise-address", switchAddr)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, k.stop()) }()
	if err := errors.Join(makeNamespace(ctx, k.client), b.documentedRights(ctx, k.client)); err != nil {
		return nil, err
	}
	admin, own := filepath.Join(dir, "admin"), filepath.Join(dir, "lb")
	err = errors.Join(reachable(k.kubeconfig, admin, ""), reachable(k.kubeconfig, own, "system:serviceaccount:kube-system:fairlead-lb"))
	if err != nil {
		return nil, err
	}
	p := b.kubeProxy()
	s, err := b.startBalancers(ctx, 2, proxy{p.name, func(h *host, dir, _ string) (*process, error) {
		return p.start(h, dir, admin)
	}}, own, k.client, false)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.stop(ctx)) }()
	n := b.few(10, 2)
	took, vip, err := s.served(ctx, n)
	if err != nil {
		return nil, err
	}
	moved, err := s.move(ctx, vip)
	if err != nil {
		return nil, err
	}
	return []figure{
		unpaired(fmt.Sprintf("Services on kube-apiserver with an address that answers outside, of %d", n), pieces,
			float64(len(took)), expectation{}),
		unpaired(fmt.Sprintf("create to first answer through kube-proxy, p50 of %d", n), milliseconds, percentile(took, 0.5), expectation{}),
		unpaired("kube-proxy of the node ends to another node answers", seconds, moved.Seconds(), expectation{below: 5}),
	}, nil
}

// move ends the proxy of the node that has an address, and returns after how long another one
// has it and answers.
func (s *balancers) move(ctx context.Context, vip netip.AddrPort) (time.Duration, error) {
	var was int
	if err := waitFor(ctx, time.Minute, 10*time.Millisecond, s.lbs[0], func() (err error) {
		was, err = s.owner(ctx, vip.Addr())
		return err
	}); err != nil {
		return 0, err
	}
	begin := time.Now()
	if err := s.proxies[was].stop(); err != nil {
		return 0, err
	}
	err := waitFor(ctx, time.Minute, 10*time.Millisecond, s.lbs[was], func() error {
		now, err := s.owner(ctx, vip.Addr())
		if err == nil && now == was {
			err = fmt.Errorf("%s still has %s", s.hosts[was].name, vip.Addr())
		}
		return err
	})
	if err != nil {
		return 0, err
	}
	at, err := s.answered(ctx, vip)
	return at.Sub(begin), err
}

// runLBCreate measures from the creation of a Service to the first answer of its address.
func (b *bench) runLBCreate(ctx context.Context) (figures []figure, err error) {
	n := b.few(200, 3)
	err = b.inBalancers(ctx, lbPeers, func(s *balancers) error {
		warm, err := s.create(ctx, "warm", 0)
		if err == nil {
			_, err = s.answered(ctx, warm) // everything has begun
		}
		if err != nil {
			return err
		}
		took, _, err := s.served(ctx, n)
		if err != nil {
			return err
		}
		figures = []figure{
			unpaired(fmt.Sprintf("create to first answer outside, %d nodes, p50 of %d", lbPeers, n),
				milliseconds, percentile(took, 0.5), expectation{}),
			unpaired(fmt.Sprintf("create to first answer outside, %d nodes, p99 of %d", lbPeers, n), milliseconds, percentile(took, 0.99),
				expectation{below: 300}),
		}
		return nil
	})
	return figures, err
}
