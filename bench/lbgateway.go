package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/clientcmd"
)

// What a Gateway of this run has: so many hosts with so many paths each, and then further hosts with a path each.
const (
	gatewayHosts  = 1000
	gatewayPaths  = 5
	gatewayRoutes = 3000
)

var gatewayVersion = schema.GroupVersion{Group: "gateway.networking.k8s.io", Version: "v1"}

func hostOfRoute(i int) string { return fmt.Sprintf("h%04d.example.com", i) }

func pathOfRoute(i int) string { return fmt.Sprintf("/path%d", i) }

// gatewayRequests are a request for each path of each host.
func gatewayRequests(hosts int) (out [][]byte) {
	for h := range hosts {
		for p := range gatewayPaths {
			out = append(out, requestFor(hostOfRoute(h), pathOfRoute(p)+"/a"))
		}
	}
	return out
}

func requestFor(host, path string) []byte {
	return fmt.Appendf(nil, "GET %s HTTP/1.1\r\nHost: %s\r\nUser-Agent: bench/1\r\nAccept: */*\r\n\r\n", path, host)
}

// haproxyRoutes writes the map of HAProxy, and returns the line of a listener that looks requests up in it.
func (w *webRig) haproxyRoutes() (line string, err error) {
	if w.hosts == 0 {
		return "", nil
	}
	var text strings.Builder
	for h := range w.hosts {
		for p := range gatewayPaths {
			fmt.Fprintf(&text, "%s%s routed\n", hostOfRoute(h), pathOfRoute(p))
		}
	}
	file := filepath.Join(w.dir, "routes.map")
	return "    use_backend %[base,map_beg(" + file + ",routed)]\n", os.WriteFile(file, []byte(text.String()), 0o600)
}

// nginxRoutes are the servers of nginx.
func (w *webRig) nginxRoutes() string {
	var text strings.Builder
	if w.hosts > 0 {
		fmt.Fprintf(&text, "server_names_hash_max_size %d; server_names_hash_bucket_size 64;\n", 4*w.hosts)
	}
	for h := range w.hosts {
		fmt.Fprintf(&text, "    server { listen %d; listen %d ssl; server_name %s;", listenerNamed("http").port, listenerNamed("https").port,
			hostOfRoute(h))
		for p := range gatewayPaths {
			fmt.Fprintf(&text, " location %s { proxy_pass http://pods; }", pathOfRoute(p))
		}
		text.WriteString(" }\n")
	}
	return text.String()
}

// gatewayRig has a Gateway in the place of fairlead's Service.
type gatewayRig struct {
	*webRig
	gateways, routes, ingresses dynamic.ResourceInterface
}

func newGatewayRig(w *webRig) (*gatewayRig, error) {
	config, err := clientcmd.BuildConfigFromFlags("", w.kubeconfig)
	if err != nil {
		return nil, err
	}
	config.QPS, config.Timeout, config.UserAgent = -1, time.Minute, "fairlead-bench"
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	return &gatewayRig{
		w, client.Resource(gatewayVersion.WithResource("gateways")).Namespace(benchNamespace),
		client.Resource(gatewayVersion.WithResource("httproutes")).Namespace(benchNamespace),
		client.Resource(networkingv1.SchemeGroupVersion.WithResource("ingresses")).Namespace(benchNamespace),
	}, nil
}

func object(kind, name string, spec map[string]any) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": gatewayVersion.String(), "kind": kind, "metadata": map[string]any{"name": name}, "spec": spec,
	}}
}

// begin makes the Gateway, and waits for its address.
func (g *gatewayRig) begin(ctx context.Context) error {
	listeners := []any{
		map[string]any{"name": "http", "port": int64(listenerNamed("http").port), "protocol": "HTTP"},
		map[string]any{
			"name": "https", "port": int64(listenerNamed("https").port), "protocol": "HTTPS",
			"tls": map[string]any{"certificateRefs": []any{map[string]any{"name": "web"}}},
		},
	}
	gateway := object("Gateway", "front", map[string]any{"gatewayClassName": "fairlead", "listeners": listeners})
	return waitFor(ctx, time.Minute, 20*time.Millisecond, g.controller, func() error {
		got, err := g.gateways.Get(ctx, "front", metav1.GetOptions{})
		if err != nil { // the kinds are installed a few seconds after the start
			_, err = g.gateways.Create(ctx, gateway, metav1.CreateOptions{})
			return errors.Join(err, errors.New("the Gateway has just been made"))
		}
		addresses, _, _ := unstructured.NestedSlice(got.Object, "status", "addresses")
		if len(addresses) == 0 {
			return errors.New("the Gateway has no address")
		}
		a, err := netip.ParseAddr(fmt.Sprint(addresses[0].(map[string]any)["value"]))
		g.carriers[0] = &webCarrier{"fairlead", g.lbs[0], a}
		return err
	})
}

// route makes an HTTPRoute of a host.
func (g *gatewayRig) route(ctx context.Context, name, host string, paths ...string) error {
	var rules []any
	for _, p := range paths {
		rules = append(rules, map[string]any{
			"matches":     []any{map[string]any{"path": map[string]any{"type": "PathPrefix", "value": p}}},
			"backendRefs": []any{map[string]any{"name": "web", "port": int64(listenerNamed("http").port)}},
		})
	}
	_, err := g.routes.Create(ctx, object("HTTPRoute", name, map[string]any{
		"parentRefs": []any{map[string]any{"name": "front"}}, "hostnames": []any{host}, "rules": rules,
	}), metav1.CreateOptions{})
	return err
}

// fill makes the routes of hosts from to, and waits until the last one answers.
func (g *gatewayRig) fill(ctx context.Context, from, to int, paths ...string) error {
	if err := makeAll(ctx, from, to, func(ctx context.Context, h int) error {
		return g.route(ctx, fmt.Sprintf("route%04d", h), hostOfRoute(h), paths...)
	}); err != nil {
		return err
	}
	for _, h := range []int{from, to - 1} {
		for _, p := range paths {
			if _, err := g.live(ctx, g.front(), hostOfRoute(h), p, func() error { return nil }); err != nil {
				return err
			}
		}
	}
	return nil
}

// makeAll makes the objects from to, eight at a time.
func makeAll(ctx context.Context, from, to int, write func(ctx context.Context, i int) error) error {
	writers, writing := errgroup.WithContext(ctx)
	writers.SetLimit(8)
	for i := from; i < to; i++ {
		writers.Go(func() error { return write(writing, i) })
	}
	return writers.Wait()
}

// front is the listener for HTTP of the Gateway.
func (g *gatewayRig) front() webLoad { return g.load(g.carriers[0], "http") }

// live returns how long after the begin of a write a request for a host and a path is answered by an endpoint behind a front, in
// milliseconds.
func (g *gatewayRig) live(ctx context.Context, front webLoad, host, path string, write func() error) (float64, error) {
	return afterWrite(ctx, write, func(ctx context.Context) (at time.Time, err error) {
		err = front.clients(1, func(int) error {
			c, _, err := front.open(nil)
			if err != nil {
				return err
			}
			defer c.Close()
			request, b := requestFor(host, path), make([]byte, 4<<10)
			for ctx.Err() == nil {
				status, err := statusOf(c, request, b)
				if err != nil {
					return err
				}
				if status == "200" {
					at = time.Now()
					return nil
				}
				time.Sleep(200 * time.Microsecond)
			}
			return fmt.Errorf("no endpoint answers for %s%s: %w", host, path, ctx.Err())
		})
		return at, err
	})
}

// afterWrite returns how long after the begin of a write it is answered, in milliseconds. answered waits for that, at most a minute,
// and no longer than the write succeeds.
func afterWrite(ctx context.Context, write func() error, answered func(context.Context) (time.Time, error)) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	var at time.Time
	ended := make(chan error, 1)
	go func() {
		var err error
		at, err = answered(ctx)
		ended <- err
	}()
	begin := time.Now()
	if err := write(); err != nil {
		cancel()
		_ = <-ended // the caller wants the error of the write
		return 0, err
	}
	err := <-ended
	return milliseconds.in(at.Sub(begin)), err
}

var lengthField = []byte("\r\nContent-Length: ")

// statusOf sends a request and reads the answer, whose status it returns.
func statusOf(c io.ReadWriter, request, b []byte) (string, error) {
	if _, err := c.Write(request); err != nil {
		return "", err
	}
	for n := 0; n < len(b); {
		m, err := c.Read(b[n:])
		n += m
		if end := bytes.Index(b[:n], headEnd); end >= 0 {
			_, rest, _ := bytes.Cut(b[:end+2], lengthField)
			digits, _, _ := bytes.Cut(rest, headEnd[:2])
			length, err := strconv.Atoi(string(digits))
			if err != nil {
				return "", fmt.Errorf("answered %.300q", b[:n])
			}
			if n >= end+len(headEnd)+length {
				return string(b[9:12]), nil
			}
		}
		if err != nil {
			return "", err
		}
	}
	return "", fmt.Errorf("answered %.300q", b)
}

func gatewaySteps() []step {
	return []step{keptRequests("http", 0.9), keptRequests("https", 0.7)}
}

func (b *bench) runGateway(ctx context.Context) (figures []figure, err error) {
	hosts := b.few(gatewayHosts, 20)
	err = b.inWeb(ctx, hosts, false, func(w *webRig) error {
		g, err := newGatewayRig(w)
		if err != nil {
			return err
		}
		if err := g.begin(ctx); err != nil {
			return err
		}
		figures, err = g.measure(ctx)
		return err
	})
	return figures, err
}

// measure has the figures of a Gateway: its memory, its requests, and how fast it takes changes.
func (g *gatewayRig) measure(ctx context.Context) ([]figure, error) {
	if err := g.fill(ctx, 0, 1, "/", pathOfRoute(0)); err != nil { // the first table, and what it needs
		return nil, err
	}
	before, err := g.lbs[0].groupMemory()
	if err != nil {
		return nil, err
	}
	if err := g.routes.Delete(ctx, "route0000", metav1.DeleteOptions{}); err != nil {
		return nil, err
	}
	var paths []string
	for p := range gatewayPaths {
		paths = append(paths, pathOfRoute(p))
	}
	begin := time.Now()
	if err := g.fill(ctx, 0, g.hosts, paths...); err != nil {
		return nil, err
	}
	filled := time.Since(begin)
	figures, err := g.atRest(ctx, before)
	if err != nil {
		return nil, err
	}
	g.requests = gatewayRequests(g.hosts)
	got, err := g.measureSteps(ctx, gatewaySteps())
	if err != nil {
		return nil, err
	}
	figures = append(figures, unpaired(fmt.Sprintf("%d HTTPRoutes from the first write to the last answer", g.hosts), seconds,
		filled.Seconds(), expectation{}))
	figures = append(figures, g.stepFigures(gatewaySteps(), got)...)
	all := g.bench.few(gatewayRoutes, 30)
	if err := errors.Join(g.fill(ctx, g.hosts, all, "/"), g.settle(ctx)); err != nil {
		return nil, err
	}
	routes, err := g.writes(ctx, g.front(), fmt.Sprintf("an HTTPRoute to its first answer, at %d of them", all), g.route)
	if err != nil {
		return nil, err
	}
	ingresses, err := g.measureIngresses(ctx, all)
	return slices.Concat(figures, routes, ingresses), err
}

// writes has the figures of writes, 20 a second, each of an object for a host of its own, until a client has an answer from behind a front.
func (g *gatewayRig) writes(ctx context.Context, front webLoad, what string,
	write func(ctx context.Context, name, host string, paths ...string) error,
) ([]figure, error) {
	var took, written []float64
	for i := range g.bench.few(100, 5) {
		name := fmt.Sprintf("new%04d", i)
		ms, err := g.live(ctx, front, name+".example.com", "/", func() error {
			begin := time.Now()
			err := write(ctx, name, name+".example.com", "/")
			written = append(written, milliseconds.in(time.Since(begin)))
			return err
		})
		if err != nil {
			return nil, err
		}
		took = append(took, ms)
		time.Sleep(50 * time.Millisecond)
	}
	what = fmt.Sprintf("write of %s, %%s of %d", what, len(took))
	return []figure{
		unpaired(fmt.Sprintf(what, "p50"), milliseconds, percentile(took, 0.5), expectation{below: 10}),
		unpaired(fmt.Sprintf(what, "p99"), milliseconds, percentile(took, 0.99), expectation{below: 20}),
		unpaired("… of it until the API server has answered the write, p50", milliseconds, percentile(written, 0.5), expectation{}),
		unpaired("… p99", milliseconds, percentile(written, 0.99), expectation{}),
	}, nil
}

// settle waits until the routes have their statuses, and the processes have seen these.
func (g *gatewayRig) settle(ctx context.Context) error {
	if err := waitFor(ctx, 2*time.Minute, time.Second, g.controller, func() error {
		routes, err := g.routes.List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, r := range routes.Items {
			if parents, _, _ := unstructured.NestedSlice(r.Object, "status", "parents"); len(parents) == 0 {
				return fmt.Errorf("%s has no status", r.GetName())
			}
		}
		return nil
	}); err != nil {
		return err
	}
	return g.calm()
}

// calm waits until the processes have nothing to do.
func (g *gatewayRig) calm() error {
	for _, p := range []*process{g.controller, g.lbs[0]} {
		if err := p.settle(2 * time.Minute); err != nil {
			return err
		}
	}
	return nil
}

// atRest is what the routes cost while nothing happens. before is fairlead's memory without them.
func (g *gatewayRig) atRest(ctx context.Context, before float64) (figures []figure, err error) {
	if err := g.settle(ctx); err != nil {
		return nil, err
	}
	rest := time.Duration(g.bench.few(5, 1)) * time.Second
	used, err := g.lbs[0].groupCPU()
	if err != nil {
		return nil, err
	}
	select {
	case <-time.After(rest):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	after, err := g.lbs[0].groupCPU()
	if err != nil {
		return nil, err
	}
	mine, err := g.lbs[0].groupMemory()
	if err != nil {
		return nil, err
	}
	routes := fmt.Sprintf("%d hosts with %d paths each", g.hosts, gatewayPaths)
	figures = append(figures,
		unpaired("memory of the load balancer that "+routes+" add", megabytes, (mine-before)/1e6, expectation{below: 40}),
		unpaired("CPU in a second in which nothing changes", milliseconds, milliseconds.in(after-used)/rest.Seconds(), expectation{below: 10}))
	for _, c := range g.carriers[1:] {
		theirs, err := c.proc.groupMemory()
		if err != nil {
			return nil, err
		}
		figures = append(figures, figure{
			what: "memory with " + routes, unit: megabytes, fairlead: mine / 1e6, peer: theirs / 1e6, peerName: c.name,
		})
	}
	return figures, nil
}
