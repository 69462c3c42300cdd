package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// ingress makes an Ingress of a host.
func (g *gatewayRig) ingress(ctx context.Context, name, host string, paths ...string) error {
	var list []any
	for _, p := range paths {
		list = append(list, map[string]any{
			"path": p, "pathType": "Prefix", "backend": map[string]any{"service": map[string]any{
				"name": "web", "port": map[string]any{"number": int64(listenerNamed("http").port)},
			}},
		})
	}
	o := object("Ingress", name, map[string]any{
		"ingressClassName": "fairlead", "rules": []any{map[string]any{"host": host, "http": map[string]any{"paths": list}}},
	})
	o.SetAPIVersion(networkingv1.SchemeGroupVersion.String())
	_, err := g.ingresses.Create(ctx, o, metav1.CreateOptions{})
	return err
}

// measureIngresses has the figures of another Ingress beside so many, whose front has an address of its own.
func (g *gatewayRig) measureIngresses(ctx context.Context, all int) ([]figure, error) {
	name := func(i int) string { return fmt.Sprintf("ingress%04d", i) }
	host := func(i int) string { return name(i) + ".example.com" }
	if err := makeAll(ctx, 0, all, func(ctx context.Context, i int) error { return g.ingress(ctx, name(i), host(i), "/") }); err != nil {
		return nil, err
	}
	front := g.front()
	if err := waitFor(ctx, 2*time.Minute, 100*time.Millisecond, g.controller, func() error {
		got, err := g.ingresses.Get(ctx, name(all-1), metav1.GetOptions{})
		if err != nil {
			return err
		}
		addresses, _, _ := unstructured.NestedSlice(got.Object, "status", "loadBalancer", "ingress")
		if len(addresses) == 0 {
			return errors.New("the last Ingress has no address")
		}
		a, err := netip.ParseAddr(fmt.Sprint(addresses[0].(map[string]any)["ip"]))
		front.load.to = at(a, 80)
		return err
	}); err != nil {
		return nil, err
	}
	_, err := g.live(ctx, front, host(all-1), "/", func() error { return nil })
	if err := errors.Join(err, g.calm()); err != nil {
		return nil, err
	}
	return g.writes(ctx, front, fmt.Sprintf("an Ingress to its first answer, at %d of them", all), g.ingress)
}
