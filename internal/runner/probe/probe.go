// Package probe checks a container once or periodically, as kubelet's probes do.
package probe

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// Target is the container that is probed.
type Target struct {
	// IP is the pod's address; packets leave from the caller's network
	// namespace.
	IP netip.Addr
	// Ports are the ports of the container, for ports given by name.
	Ports []corev1.ContainerPort
	// Exec runs a command in the container. It returns the exit code and what
	// it wrote.
	Exec func(ctx context.Context, args []string) (int, []byte, error)
}

// maxBody is how much of a response is read, that of kubelet; maxHeader how much of what
// comes before it. The server may be anybody's.
const maxBody, maxHeader = 10 << 10, 64 << 10

// Once probes once; nil means success.
func (t Target) Once(ctx context.Context, h corev1.ProbeHandler) error {
	switch {
	case h.HTTPGet != nil:
		return t.HTTP(ctx, h.HTTPGet)
	case h.TCPSocket != nil:
		return t.tcp(ctx, h.TCPSocket)
	case h.Exec != nil:
		return t.exec(ctx, h.Exec)
	case h.GRPC != nil:
		return t.grpc(ctx, h.GRPC)
	}
	return errors.New("the probe has neither httpGet, tcpSocket, exec nor grpc")
}

func (t Target) exec(ctx context.Context, e *corev1.ExecAction) error {
	code, out, err := t.Exec(ctx, e.Command)
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("command %q timed out", e.Command)
	case err != nil:
		return err
	case code != 0:
		return fmt.Errorf("command %q exited with %d: %s", e.Command, code, bytes.TrimSpace(out))
	}
	return nil
}

func (t Target) tcp(ctx context.Context, a *corev1.TCPSocketAction) error {
	addr, err := t.address(a.Host, a.Port)
	if err != nil {
		return err
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	return c.Close()
}

// HTTP sends a request as a probe or a lifecycle hook does; a status from 200 to
// 399 is a success.
func (t Target) HTTP(ctx context.Context, a *corev1.HTTPGetAction) error {
	addr, err := t.address(a.Host, a.Port)
	if err != nil {
		return err
	}
	scheme := strings.ToLower(string(a.Scheme))
	if scheme == "" {
		scheme = "http"
	}
	u, err := url.Parse(a.Path)
	if err != nil {
		u = &url.URL{Path: a.Path}
	}
	u = &url.URL{Scheme: scheme, Host: addr, Path: "/" + strings.TrimPrefix(u.Path, "/"), RawQuery: u.RawQuery}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return err
	}
	// Applications recognize probes by this name.
	req.Header.Set("User-Agent", "kube-probe/fairlead")
	req.Header.Set("Accept", "*/*")
	for _, h := range a.HTTPHeaders {
		if http.CanonicalHeaderKey(h.Name) == "Host" {
			req.Host = h.Value
		} else {
			req.Header.Add(h.Name, h.Value)
		}
	}
	client := &http.Client{
		Transport: &http.Transport{
			DisableKeepAlives: true, DisableCompression: true, Proxy: nil, MaxResponseHeaderBytes: maxHeader,
			TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, // as kubelet: a pod's certificate names a Service
		},
		CheckRedirect: sameHost,
	}
	res, err := client.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(io.LimitReader(res.Body, maxBody))
	if err != nil {
		return err
	}
	if res.StatusCode < 200 || res.StatusCode >= 400 {
		return fmt.Errorf("HTTP probe failed with statuscode: %d: %s", res.StatusCode, bytes.TrimSpace(body[:min(len(body), 200)]))
	}
	return nil
}

// sameHost follows redirects to the same host and takes any other as the response:
// a probe must not be sent across the network.
func sameHost(req *http.Request, via []*http.Request) error {
	if req.URL.Hostname() != via[0].URL.Hostname() {
		return http.ErrUseLastResponse
	}
	if len(via) >= 10 {
		return errors.New("stopped after 10 redirects")
	}
	return nil
}

func (t Target) address(host string, port intstr.IntOrString) (string, error) {
	if host == "" {
		host = t.IP.String()
	}
	n := port.IntValue()
	if port.Type == intstr.String {
		var err error
		if n, err = t.named(port.StrVal); err != nil {
			return "", err
		}
	}
	if n < 1 || n > 65535 {
		return "", fmt.Errorf("port %s is not one of 1 to 65535 and not the name of a container port", port.String())
	}
	return net.JoinHostPort(host, strconv.Itoa(n)), nil
}

func (t Target) named(name string) (int, error) {
	for _, p := range t.Ports {
		if p.Name == name {
			return int(p.ContainerPort), nil
		}
	}
	return strconv.Atoi(name)
}

// Watcher probes periodically.
type Watcher struct {
	Probe *corev1.Probe
	// Since is the container's start: the initial delay counts from there.
	Since time.Time
	// Eager probes more often than every period until the first success: at
	// once, then after 20 ms, 40 ms and so on. These probes, the very first
	// included, never count as failures. A process that is up in 50 ms is ready
	// then, and not a period later.
	Eager bool
	// Answer is called with true when successThreshold probes in a row have
	// succeeded, and with false at failureThreshold failures in a row and at each
	// further one.
	Answer func(ok bool)
	// Failed is called with each failure that counts.
	Failed func(error)
}

// firstDelay is the delay between the first two probes of an eager Watcher.
const firstDelay = 20 * time.Millisecond

// Run probes with once until ctx ends.
func (w Watcher) Run(ctx context.Context, once func(context.Context) error) {
	p := w.Probe
	period := seconds(p.PeriodSeconds, 10)
	tick := time.Now()
	if first := w.Since.Add(time.Duration(p.InitialDelaySeconds) * time.Second); first.After(tick) {
		tick = first
	}
	start, yes, no, quick, ever := tick, 0, 0, firstDelay, false
	for next := tick; ; {
		if !sleepUntil(ctx, next) {
			return
		}
		counts := !time.Now().Before(tick)
		if counts {
			counts = !w.Eager || tick != start
			tick = tick.Add(period)
			if tick.Before(time.Now()) {
				tick = time.Now().Add(period) // the machine slept
			}
		}
		err := w.probe(ctx, once, seconds(p.TimeoutSeconds, 1))
		if ctx.Err() != nil {
			return
		}
		switch {
		case err == nil:
			yes, no, ever = yes+1, 0, true
			if yes == int(max(p.SuccessThreshold, 1)) {
				w.Answer(true)
			}
		case counts:
			yes, no = 0, no+1
			w.Failed(err)
			if no >= int(orDefault(p.FailureThreshold, 3)) {
				w.Answer(false)
			}
		}
		next = tick
		if w.Eager && !ever {
			if soon := time.Now().Add(quick); soon.Before(tick) {
				next = soon
			}
			quick = min(2*quick, period)
		}
	}
}

func (w Watcher) probe(ctx context.Context, once func(context.Context) error, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return once(ctx)
}

func sleepUntil(ctx context.Context, t time.Time) bool {
	d := time.Until(t)
	if d <= 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

func seconds(n, def int32) time.Duration { return time.Duration(orDefault(n, def)) * time.Second }

func orDefault(n, def int32) int32 {
	if n <= 0 {
		return def
	}
	return n
}

// MaxOutput is how much of the output of a command is kept, in bytes.
const MaxOutput = 10 << 10
