package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// HAProxy and nginx as they carry TCP, HTTP and HTTPS on two processors, with the fields that fairlead adds, and
// with connections to backends that are kept for all clients.
const (
	haproxyWeb = `global
    maxconn 9000
    nbthread 2
defaults
    timeout connect 5s
    timeout client 1m
    timeout server 1m
    balance roundrobin
    http-reuse always
%[1]s`
	haproxyListener = `listen %[1]s
    mode %[2]s
    bind :%[3]d%[4]s
%[5]s`
	haproxyFields = `    option forwardfor
    http-request set-header X-Forwarded-Proto %[1]s
    http-request set-header X-Forwarded-Port %%[dst_port]
`
	nginxWeb = `load_module %[1]s;
worker_processes 2;
user root;
daemon off;
pid nginx.pid;
error_log stderr crit;
events { worker_connections 9000; }
stream {
    upstream pods { %[2]s }
    server { listen %[3]d; proxy_pass pods; }
}
http {
    access_log off;
    keepalive_requests 1000000000;
    client_body_temp_path tmp1; proxy_temp_path tmp2; fastcgi_temp_path tmp3; uwsgi_temp_path tmp4; scgi_temp_path tmp5;
    upstream pods { %[2]s keepalive 128; keepalive_requests 1000000000; }
    upstream calls { %[8]s keepalive 128; keepalive_requests 1000000000; }
    proxy_http_version 1.1;
    proxy_set_header Connection "";
    proxy_set_header Host $http_host;
    proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
    proxy_set_header X-Forwarded-Proto $scheme;
    proxy_set_header X-Forwarded-Port $server_port;
    grpc_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
    grpc_set_header X-Forwarded-Proto $scheme;
    grpc_set_header X-Forwarded-Port $server_port;
    ssl_protocols TLSv1.2 TLSv1.3;
    ssl_session_cache shared:sessions:10m;
    ssl_certificate %[6]s;
    ssl_certificate_key %[6]s;
    server { listen %[4]d; location / { proxy_pass http://pods; } }
    server { listen %[5]d ssl; location / { proxy_pass http://pods; } }
    server { listen %[7]d http2; location / { proxy_pass http://pods; } }
    server { listen %[9]d ssl http2; location / { proxy_pass http://pods; } }
    server { listen %[10]d ssl http2; location / { grpc_pass grpc://calls; } }
    %[11]s
}
`
)

// webRig is fairlead's load balancer beside the peers that there are: on a host each, with the same proxy for
// Services on it, as a node has one.
type webRig struct {
	*balancers
	hosts    int      // with routes: see lbgateway.go
	requests [][]byte // see webLoad
	pem      string   // a file with certificate and key
	carriers []*webCarrier
	stops    []func() error
}

// webCarrier is a program that carries connections.
type webCarrier struct {
	name string
	proc *process
	addr netip.Addr
}

// webPods are the endpoints behind the load balancers.
func webPods() (out []netip.Addr) {
	for i := range uint32(3) {
		out = append(out, endpointAddr(i))
	}
	return out
}

// inWeb makes a webRig for f, whose peers have routes of hosts. It waits for the listeners that f uses: the ones of HTTP/2, or the
// others.
func (b *bench) inWeb(ctx context.Context, hosts int, http2 bool, f func(*webRig) error) error {
	return b.inBalancers(ctx, 1, func(s *balancers) (err error) {
		w := &webRig{balancers: s, hosts: hosts}
		defer func() {
			for _, stop := range w.stops {
				err = errors.Join(err, stop())
			}
		}()
		if err := errors.Join(manyPorts(s.outside), manyPorts(s.hosts[0])); err != nil {
			return err
		}
		if err := errors.Join(w.startPods(ctx), w.certificate(ctx), w.startFairlead(ctx), w.startPeers(ctx)); err != nil {
			return err
		}
		for _, c := range w.carriers {
			for _, l := range webListeners {
				if l.http2 != http2 {
					continue
				}
				if err := waitFor(ctx, time.Minute, 50*time.Millisecond, c.proc, func() (err error) {
					if l.http2 {
						_, _, err = w.multiplexed(1, 1)(ctx, w.load(c, l.name), 10*time.Millisecond)
					} else {
						_, err = w.load(c, l.name).kept(ctx, 1, time.Millisecond)
					}
					return err
				}); err != nil {
					return fmt.Errorf("%s does not carry %s: %w", c.name, l.name, err)
				}
			}
		}
		return f(w)
	})
}

// load is what clients outside do at a carrier.
func (w *webRig) load(c *webCarrier, listener string) webLoad {
	of := listenerNamed(listener)
	l := webLoad{load: load{w.outside, at(c.addr, of.port)}, calls: of.calls, requests: w.requests}
	if of.tls {
		l.tls = webTLS()
	}
	return l
}

func (w *webRig) startPods(ctx context.Context) error {
	h, err := hostNamed("backends")
	if err != nil {
		return err
	}
	p, err := spawn(h, w.dir, "web", w.bench.self, webCommand, listenAt(loadPort), listenAt(callPort))
	if err == nil {
		w.stops = append(w.stops, p.stop)
	}
	return err
}

// certificate makes the next certificate, in a file and in the Secret.
func (w *webRig) certificate(ctx context.Context) error {
	cert, key, err := webCertificate()
	if err != nil {
		return err
	}
	w.pem = filepath.Join(w.dir, "pem")
	if err := os.WriteFile(w.pem, append(cert, key...), 0o600); err != nil {
		return err
	}
	api := w.client.CoreV1().Secrets(benchNamespace)
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "web"}, Type: corev1.SecretTypeTLS,
		Data: map[string][]byte{corev1.TLSCertKey: cert, corev1.TLSPrivateKeyKey: key},
	}
	if _, err = api.Update(ctx, secret, metav1.UpdateOptions{}); err != nil {
		_, err = api.Create(ctx, secret, metav1.CreateOptions{})
	}
	return err
}

// setPods makes the Service have endpoints.
func (w *webRig) setPods(ctx context.Context, pods []netip.Addr) error {
	slice := endpointSlice("web", 0, pods)
	slice.Ports = nil
	for _, l := range webListeners {
		slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{
			Name: &l.name, Port: new(int32(l.target())), Protocol: new(corev1.ProtocolTCP),
		})
	}
	api := w.client.DiscoveryV1().EndpointSlices(benchNamespace)
	_, err := api.Update(ctx, slice, metav1.UpdateOptions{})
	if err != nil {
		_, err = api.Create(ctx, slice, metav1.CreateOptions{})
	}
	return err
}

func (w *webRig) startFairlead(ctx context.Context) error {
	if err := w.setPods(ctx, webPods()); err != nil {
		return err
	}
	service := loadBalancer("web")
	var protocols, backends []string
	service.Spec.Ports = nil
	for _, l := range webListeners {
		protocols = append(protocols, fmt.Sprintf("%d=%s", l.port, l.protocol()))
		switch {
		case l.calls:
			backends = append(backends, fmt.Sprintf("%d=h2c", l.port))
		case l.tls:
			backends = append(backends, fmt.Sprintf("%d=http", l.port))
		}
		service.Spec.Ports = append(service.Spec.Ports, corev1.ServicePort{
			Name: l.name, Port: int32(l.port), TargetPort: intstr.FromInt32(int32(l.target())),
		})
	}
	service.Annotations = map[string]string{
		"fairlead.dev/lb-protocol": strings.Join(protocols, ","), "fairlead.dev/lb-backend-protocol": strings.Join(backends, ","),
		"fairlead.dev/lb-tls-secrets": "web",
	}
	if _, err := w.client.CoreV1().Services(benchNamespace).Create(ctx, service, metav1.CreateOptions{}); err != nil {
		return err
	}
	vip, err := w.address(ctx, "web")
	w.carriers = append(w.carriers, &webCarrier{"fairlead", w.lbs[0], vip.Addr()})
	return err
}

// startPeers starts HAProxy and nginx.
func (w *webRig) startPeers(ctx context.Context) error {
	debian := filepath.Join(w.bench.peers, "debian")
	var listeners, upstreams, calls strings.Builder
	for _, a := range webPods() {
		fmt.Fprintf(&upstreams, "server %s:%d; ", a, loadPort)
		fmt.Fprintf(&calls, "server %s:%d; ", a, callPort)
	}
	routes, err := w.haproxyRoutes()
	if err != nil {
		return err
	}
	for _, l := range webListeners {
		listeners.WriteString(w.haproxyListen(l, routes))
	}
	if routes != "" {
		listeners.WriteString("backend routed\n    mode http\n" + haproxyServers(loadPort, ""))
	}
	port := func(name string) int { return listenerNamed(name).port }
	module := filepath.Join(debian, "usr/lib/nginx/modules/ngx_stream_module.so")
	for _, p := range []struct{ name, program, config string }{
		{"HAProxy", "haproxy", fmt.Sprintf(haproxyWeb, listeners.String())},
		{"nginx", "nginx", fmt.Sprintf(nginxWeb, module, upstreams.String(), port("tcp"), port("http"), port("https"), w.pem,
			port("h2c"), calls.String(), port("h2"), port("grpc"), w.nginxRoutes())},
	} {
		program := w.bench.peer("debian/usr/sbin/" + p.program)
		if program == "" {
			continue
		}
		h, err := w.attach(ctx, p.program)
		if err != nil {
			return err
		}
		w.stops = append(w.stops, func() error { return h.remove(context.WithoutCancel(ctx)) })
		proxy, err := w.bench.fairleadProxy().start(h, w.dir, w.kubeconfig)
		if err != nil {
			return err
		}
		dir, err := os.MkdirTemp(w.dir, p.program+"-")
		if err != nil {
			return err
		}
		config := filepath.Join(dir, "config")
		if err := errors.Join(manyPorts(h), h.sysctl("net/ipv4/ip_forward", "1"), os.WriteFile(config, []byte(p.config), 0o600)); err != nil {
			return err
		}
		args := []string{"-db", "-f", config}
		if p.program == "nginx" {
			args = []string{"-p", dir, "-e", "stderr", "-c", config}
		}
		proc, err := spawnDebian(h, debian, dir, p.program, program, args...)
		if err != nil {
			return err
		}
		w.stops = append([]func() error{proc.stop, proxy.stop}, w.stops...)
		own, err := netip.ParseAddr(fmt.Sprintf("%s%d", lbHosts, h.addr.As4()[3]))
		if err != nil {
			return err
		}
		w.carriers = append(w.carriers, &webCarrier{p.name, proc, own})
	}
	return nil
}

func haproxyServers(port int, more string) (lines string) {
	for i, a := range webPods() {
		lines += fmt.Sprintf("    server pod%d %s:%d%s\n", i, a, port, more)
	}
	return lines
}

// haproxyListen is a listener of HAProxy with its endpoints. A listener of HTTP/1.1 has the line with routes.
func (w *webRig) haproxyListen(l webListener, routes string) string {
	mode, bind, server, lines := "http", "", "", fmt.Sprintf(haproxyFields, l.protocol())
	switch {
	case l.name == "tcp":
		mode, lines = "tcp", ""
	case l.tls && l.http2:
		bind = " ssl crt " + w.pem + " alpn h2"
	case l.tls:
		bind = " ssl crt " + w.pem + " alpn http/1.1"
	case l.http2:
		bind = " proto h2"
	}
	if l.calls {
		server = " proto h2"
	}
	if mode == "http" && !l.http2 {
		lines += routes
	}
	return fmt.Sprintf(haproxyListener, l.name, mode, l.port, bind, lines+haproxyServers(l.target(), server))
}

// spawnDebian starts a program that finds its libraries beside it.
func spawnDebian(h *host, debian, dir, name, program string, args ...string) (*process, error) {
	libraries, _ := filepath.Glob(filepath.Join(debian, "usr/lib/*-linux-gnu*"))
	env := "LD_LIBRARY_PATH=" + filepath.Join(append(libraries, "")[0])
	return spawn(h, dir, name, "/usr/bin/env", append([]string{env, program}, args...)...)
}
