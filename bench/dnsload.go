package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"time"
)

// dnsLoads is how often each server is started; the middle figure counts.
const dnsLoads = 3

// runDNSLoad measures how long a server of names takes from the start of its
// process until it answers for the last of many Services, all of it: the lists
// on their way, and the zone made of them.
func (b *bench) runDNSLoad(ctx context.Context) (figures []figure, err error) {
	a, err := b.startAPI(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, a.stop()) }()
	small := shape{prefix: "svc", services: b.few(1000, 20), endpoints: b.few(10, 2)}
	large := shape{prefix: "more", services: b.few(9000, 20), endpoints: b.few(10, 2), from: small.next()}
	for _, s := range []shape{small, large} {
		made, err := fill(ctx, a.client, s)
		if err != nil {
			return nil, err
		}
		if err := a.settle(time.Minute); err != nil {
			return nil, err
		}
		f, err := b.loadFigure(ctx, a, s, made)
		if err != nil {
			return nil, err
		}
		figures = append(figures, f)
	}
	return figures, nil
}

// loadFigure starts the servers in turns while the API has the Services of s and
// of the shapes before it.
func (b *bench) loadFigure(ctx context.Context, a *api, s shape, made []service) (figure, error) {
	kinds := dnsWorld{services: made}.questions()[:1]
	servers := []nameserver{b.fairleadDNS()}
	if b.peer("coredns") != "" {
		servers = append(servers, b.coreDNS())
	}
	took := make([][]float64, len(servers))
	for range b.few(dnsLoads, 1) {
		for i, n := range servers {
			ready, err := b.startToAnswer(ctx, a, n, kinds[0], len(made)-1)
			if err != nil {
				return figure{}, fmt.Errorf("%s: %w", n.name, err)
			}
			took[i] = append(took[i], ready)
		}
	}
	for i, n := range servers {
		slices.Sort(took[i])
		b.say("%s: ready in %.2f s", n.name, took[i])
	}
	total := int(s.next()) / s.endpoints
	f := unpaired(fmt.Sprintf("DNS start to ready, %d services x %d endpoints", total, s.endpoints), seconds,
		took[0][len(took[0])/2], expectation{below: 2, share: 1. / 3})
	if len(servers) > 1 {
		f.peer, f.peerName = took[1][len(took[1])/2], servers[1].name
	}
	return f, nil
}

// startToAnswer starts a server on its own host and returns the seconds
// until it answers question i.
func (b *bench) startToAnswer(ctx context.Context, a *api, n nameserver, q question, i int) (took float64, err error) {
	h, err := b.net.host(ctx, fmt.Sprintf("load%d", b.net.count))
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, h.remove(context.WithoutCancel(ctx))) }()
	dir, err := os.MkdirTemp(b.dir, n.name+"-")
	if err != nil {
		return 0, err
	}
	p, err := n.start(h, dir, a.kubeconfig)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, p.stop()) }()
	server := netip.AddrPortFrom(h.addr, dnsPort).String()
	if err := untilAnswered(ctx, p, server, q, i); err != nil {
		return 0, err
	}
	return time.Since(p.begin).Seconds(), nil
}
