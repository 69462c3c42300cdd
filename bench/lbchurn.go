package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/clientcmd"
)

// What asks while routes, Gateways and backends change.
const (
	churnFirstConns  = 20   // of HTTP/1.1
	churnSecondConns = 4    // of HTTP/2
	churnSecondBoth  = 16   // requests of each at a time
	churnRequests    = 2000 // a second, half by each
	churnHost        = "rolls.example.com"
	churnChanges     = 20 // of each kind
)

// churnRig is a Gateway before the Deployment of a rollingRig.
type churnRig struct {
	*rollingRig
	bench            *bench
	gateways, routes dynamic.ResourceInterface
	front            netip.Addr
}

// gatewayOf makes a Gateway with a listener for HTTP, and its only route. It returns its address once it is programmed, and the route
// accepted.
func (c *churnRig) gatewayOf(ctx context.Context, name, host string) (front netip.Addr, err error) {
	listeners := []any{map[string]any{"name": "http", "port": int64(servicePort), "protocol": "HTTP"}}
	gateway := object("Gateway", name, map[string]any{"gatewayClassName": "fairlead", "listeners": listeners})
	if err := waitFor(ctx, time.Minute, 50*time.Millisecond, c.process, func() error { // the kinds are installed after the start
		_, err := c.gateways.Create(ctx, gateway, metav1.CreateOptions{})
		return err
	}); err != nil {
		return front, err
	}
	if _, err := c.routes.Create(ctx, object("HTTPRoute", name, map[string]any{
		"parentRefs": []any{map[string]any{"name": name}}, "hostnames": []any{host},
		"rules": []any{map[string]any{"backendRefs": []any{map[string]any{"name": rollingName, "port": int64(servicePort)}}}},
	}), metav1.CreateOptions{}); err != nil {
		return front, err
	}
	return front, waitFor(ctx, time.Minute, 5*time.Millisecond, c.process, func() error {
		g, err := c.gateways.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if !conditionTrue(g.Object, "Programmed", "status", "conditions") {
			return fmt.Errorf("%s is not programmed: %v", name, g.Object["status"])
		}
		r, err := c.routes.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		parents, _, _ := unstructured.NestedSlice(r.Object, "status", "parents")
		if len(parents) == 0 || !conditionTrue(parents[0].(map[string]any), "Accepted", "conditions") {
			return fmt.Errorf("the route %s is not accepted", name)
		}
		addresses, _, _ := unstructured.NestedSlice(g.Object, "status", "addresses")
		front, err = netip.ParseAddr(fmt.Sprint(addresses[0].(map[string]any)["value"]))
		return err
	})
}

// conditionTrue reports whether the conditions at a path have one that is True.
func conditionTrue(object map[string]any, kind string, path ...string) bool {
	all, _, _ := unstructured.NestedSlice(object, path...)
	return slices.ContainsFunc(all, func(k any) bool {
		m, ok := k.(map[string]any)
		return ok && m["type"] == kind && m["status"] == "True"
	})
}

// churnLoad counts the requests of clients.
type churnLoad struct {
	rig *churnRig

	mu      sync.Mutex
	sent    int
	failed  map[string]int // by the protocol
	because map[string]int
}

// note counts a request of a protocol.
func (l *churnLoad) note(protocol string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sent++
	if err != nil {
		l.failed[protocol]++
		l.because[fmt.Sprintf("%s: %.200s", protocol, err)]++
	}
}

// steadily calls do at a steady rate until ctx ends, or it returns an error.
func steadily(ctx context.Context, every time.Duration, do func() error) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if err := do(); err != nil {
			return err
		}
	}
}

// first sends requests on a kept connection of HTTP/1.1, and on another one after a failure.
func (l *churnLoad) first(ctx context.Context, every time.Duration) {
	request, b := requestFor(churnHost, "/a"), make([]byte, 4<<10)
	for ctx.Err() == nil {
		conn, err := l.rig.dialFront(ctx, l.rig.front)
		if err != nil {
			if ctx.Err() == nil {
				l.note("HTTP/1.1", err)
			}
			continue
		}
		_ = steadily(ctx, every, func() error {
			err := getOn(conn, request, b)
			l.note("HTTP/1.1", err)
			return err
		})
		_ = conn.Close()
	}
}

// getOn sends a request on a connection, and wants the status 200.
func getOn(conn net.Conn, request, b []byte) error {
	if err := conn.SetDeadline(time.Now().Add(rollingAnswer)); err != nil {
		return err
	}
	status, err := statusOf(conn, request, b)
	if err == nil && status != "200" {
		err = errors.New("status " + status)
	}
	return err
}

func (c *churnRig) dialFront(ctx context.Context, front netip.Addr) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, rollingAnswer)
	defer cancel()
	return c.outside.dial(ctx, "tcp", netip.AddrPortFrom(front, servicePort).String())
}

// second sends requests on a connection of HTTP/2, some at a time, and on another one after a failure.
func (l *churnLoad) second(ctx context.Context, every time.Duration) {
	for ctx.Err() == nil {
		conn, err := l.rig.dialFront(ctx, l.rig.front)
		if err != nil {
			if ctx.Err() == nil {
				l.note("HTTP/2", err)
			}
			continue
		}
		client, err := (&http2.Transport{AllowHTTP: true}).NewClientConn(conn)
		if err != nil {
			l.note("HTTP/2", err)
			_ = conn.Close()
			continue
		}
		var workers sync.WaitGroup
		within, end := context.WithCancel(ctx)
		for range churnSecondBoth {
			workers.Go(func() {
				defer end()
				_ = steadily(within, every, func() error {
					err := roundTrip(ctx, client)
					l.note("HTTP/2", err)
					return err
				})
			})
		}
		workers.Wait()
		end()
		_ = client.Close()
	}
}

// roundTrip sends a request on a connection, once, and wants the status 200.
func roundTrip(ctx context.Context, client *http2.ClientConn) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollingAnswer)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+churnHost+"/a", nil)
	if err != nil {
		return err
	}
	answer, err := client.RoundTrip(r)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if _, err := io.Copy(io.Discard, answer.Body); err != nil {
		return err
	}
	if answer.StatusCode != http.StatusOK {
		return errors.New("status " + answer.Status)
	}
	return nil
}

// changeRoutes changes the route of the load, by turns in what its rules do and in how many there are.
func (c *churnRig) changeRoutes(ctx context.Context, n int) error {
	for i := range n {
		to := map[string]any{"backendRefs": []any{map[string]any{"name": rollingName, "port": int64(servicePort)}}}
		changed := map[string]any{"backendRefs": to["backendRefs"], "filters": []any{map[string]any{
			"type":                  "RequestHeaderModifier",
			"requestHeaderModifier": map[string]any{"set": []any{map[string]any{"name": "X-Change", "value": fmt.Sprint(i)}}},
		}}}
		rules := []any{changed}
		if i%2 == 1 { // the path of the load gets its own rule
			changed["matches"] = []any{map[string]any{"path": map[string]any{"type": "PathPrefix", "value": "/a"}}}
			rules = append(rules, to)
		}
		patch, err := (&unstructured.Unstructured{Object: map[string]any{
			"apiVersion": gatewayVersion.String(), "kind": "HTTPRoute", "spec": map[string]any{"rules": rules},
		}}).MarshalJSON()
		if err != nil {
			return err
		}
		if _, err := c.routes.Patch(ctx, "front", types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(200 * time.Millisecond):
		}
	}
	return nil
}

// changeGateways makes Gateways, asks each right after it is programmed, and deletes it. It returns how many had no answer.
func (c *churnRig) changeGateways(ctx context.Context, n int) (silent int, why string, err error) {
	for i := range n {
		name := fmt.Sprintf("door%02d", i)
		at, err := c.gatewayOf(ctx, name, name+".example.com")
		if err != nil {
			return silent, why, err
		}
		conn, err := c.dialFront(ctx, at)
		if err == nil {
			err = getOn(conn, requestFor(name+".example.com", "/"), make([]byte, 4<<10))
			_ = conn.Close()
		}
		if err != nil {
			silent, why = silent+1, err.Error()
		}
		err = errors.Join(c.routes.Delete(ctx, name, metav1.DeleteOptions{}), c.gateways.Delete(ctx, name, metav1.DeleteOptions{}))
		if err != nil {
			return silent, why, err
		}
	}
	return silent, why, nil
}

// runGatewayChurn has clients ask a Gateway while routes, Gateways and backends change.
func (b *bench) runGatewayChurn(ctx context.Context) (figures []figure, err error) {
	r, err := b.startRolling(ctx, false)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.end(ctx)) }()
	if _, err := r.deploy(ctx, b, loadPort, webCommand, listenAt(loadPort), listenAt(callPort)); err != nil {
		return nil, err
	}
	config, err := clientcmd.BuildConfigFromFlags("", r.kubeconfig)
	if err != nil {
		return nil, err
	}
	config.QPS, config.Timeout, config.UserAgent = -1, time.Minute, "fairlead-bench"
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	c := &churnRig{
		rollingRig: r, bench: b,
		gateways: client.Resource(gatewayVersion.WithResource("gateways")).Namespace(benchNamespace),
		routes:   client.Resource(gatewayVersion.WithResource("httproutes")).Namespace(benchNamespace),
	}
	if c.front, err = c.gatewayOf(ctx, "front", churnHost); err != nil {
		return nil, err
	}
	if err := waitFor(ctx, time.Minute, 50*time.Millisecond, r.process, func() error { // until there is a Pod
		conn, err := c.dialFront(ctx, c.front)
		if err != nil {
			return err
		}
		defer conn.Close()
		return getOn(conn, requestFor(churnHost, "/"), make([]byte, 4<<10))
	}); err != nil {
		return nil, err
	}
	return c.measure(ctx)
}

func (c *churnRig) measure(ctx context.Context) ([]figure, error) {
	each := c.bench.few(churnChanges, 2)
	rate := c.bench.few(churnRequests, 200)
	load := &churnLoad{rig: c, failed: map[string]int{}, because: map[string]int{}}
	under, end := context.WithCancel(ctx)
	defer end()
	var clients sync.WaitGroup
	begin := time.Now()
	everyFirst := time.Duration(2*churnFirstConns) * time.Second / time.Duration(rate)
	for range churnFirstConns {
		clients.Go(func() { load.first(under, everyFirst) })
	}
	everySecond := time.Duration(2*churnSecondConns*churnSecondBoth) * time.Second / time.Duration(rate)
	for range churnSecondConns {
		clients.Go(func() { load.second(under, everySecond) })
	}
	silent, why := 0, ""
	err := c.changeRoutes(ctx, each)
	if err == nil {
		silent, why, err = c.changeGateways(ctx, each)
	}
	early := 0
	for i := range each {
		if err != nil {
			break
		}
		var drained []*removal
		drained, err = c.roll(ctx, i)
		early += rollingPods - len(drained)
	}
	took := time.Since(begin)
	end()
	clients.Wait()
	if err != nil {
		return nil, err
	}
	var reasons []string
	for text, n := range load.because {
		reasons = append(reasons, fmt.Sprintf("%d × %s", n, text))
	}
	slices.Sort(reasons)
	if why != "" {
		reasons = append(reasons, "a new Gateway: "+why)
	}
	if len(reasons) > 0 {
		c.bench.say("gatewaychurn: %s", strings.Join(reasons[:min(len(reasons), 10)], "; "))
	}
	what := fmt.Sprintf("of %d requests, %.0f a second, with %d changes of routes, Gateways and %d Pods replaced", load.sent,
		float64(load.sent)/took.Seconds(), each, each*rollingPods)
	return []figure{
		unpaired("HTTP/1.1 requests failed, "+what, pieces, float64(load.failed["HTTP/1.1"]), expectation{below: 1}),
		unpaired("HTTP/2 requests failed, "+what, pieces, float64(load.failed["HTTP/2"]), expectation{below: 1}),
		unpaired(fmt.Sprintf("Gateways of %d without an answer right after they are programmed", each), pieces, float64(silent),
			expectation{below: 1}),
		unpaired("Pods ended before all nodes had reported", pieces, float64(early), expectation{below: 1}),
	}, nil
}
