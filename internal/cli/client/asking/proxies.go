package asking

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"

	"github.com/fairlead/fairlead/internal/kernel/socket"
)

const (
	// namespace, labels and defaultPort are as in deploy/kubernetes/proxy.yaml. A Pod of another namespace does not speak for a node:
	// tenants may create it.
	namespace   = metav1.NamespaceSystem
	labels      = "app.kubernetes.io/name=fairlead-proxy"
	defaultPort = 10249
	// balancerLabels and balancerPort are as in deploy/kubernetes/lb.yaml.
	balancerLabels = "app.kubernetes.io/name=fairlead-lb"
	balancerPort   = 10267
	// maxPods bounds one page of the list of Pods.
	maxPods = 500
)

// program is what runs on nodes without an agent, as Pods with labels. It answers on loopback at a port unless its flags name another.
type program struct {
	name, labels string
	port         int
}

// proxies returns the ready Pods of a program by node.
func (g program) proxies(ctx context.Context, client kubernetes.Interface) (map[string]*corev1.Pod, error) {
	out := map[string]*corev1.Pod{}
	o := metav1.ListOptions{LabelSelector: g.labels, Limit: maxPods}
	for {
		list, err := client.CoreV1().Pods(namespace).List(ctx, o)
		if err != nil {
			return nil, err
		}
		for i := range list.Items {
			p := &list.Items[i]
			if p.Spec.HostNetwork && p.DeletionTimestamp == nil && p.Status.Phase == corev1.PodRunning {
				out[p.Spec.NodeName] = p
			}
		}
		if o.Continue = list.Continue; o.Continue == "" {
			return out, nil
		}
	}
}

// metricsPort is where the program of a Pod answers on loopback.
func (g program) metricsPort(p *corev1.Pod) int {
	for i := range p.Spec.Containers {
		args := append(append([]string{}, p.Spec.Containers[i].Command...), p.Spec.Containers[i].Args...)
		for k, a := range args {
			at, here := strings.CutPrefix(a, "--metrics-bind-address=")
			if !here && a == "--metrics-bind-address" && k+1 < len(args) {
				at, here = args[k+1], true
			}
			if !here {
				continue
			}
			if _, port, err := net.SplitHostPort(at); err == nil {
				if n, err := strconv.ParseUint(port, 10, 16); err == nil && n > 0 {
					return int(n)
				}
			}
		}
	}
	return g.port
}

// byPod asks the proxy of a Pod at its loopback device, by a port that the API server forwards.
func (n *Nodes) byPod(ctx context.Context, p *corev1.Pod, where string) ([]byte, error) {
	conn, err := n.dial(ctx, p)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	port := strconv.Itoa(n.program.metricsPort(p))
	headers := http.Header{}
	headers.Set(corev1.PortHeader, port)
	headers.Set(corev1.PortForwardRequestIDHeader, "0")
	headers.Set(corev1.StreamType, corev1.StreamTypeError)
	problems, err := conn.CreateStream(headers)
	if err != nil {
		return nil, err
	}
	_ = problems.Close() // nothing is sent to it
	headers.Set(corev1.StreamType, corev1.StreamTypeData)
	data, err := conn.CreateStream(headers)
	if err != nil {
		return nil, err
	}
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+net.JoinHostPort("127.0.0.1", port)+"/"+where, http.NoBody)
	if err != nil {
		return nil, err
	}
	q.Close = true
	if err := q.Write(data); err != nil {
		return nil, err
	}
	answer, err := http.ReadResponse(bufio.NewReader(data), q)
	if err != nil {
		// The kubelet gives the reason for a port that it cannot reach.
		if why, readErr := readAnswer(problems); readErr == nil && len(why) > 0 {
			return nil, errors.New(strings.TrimSpace(string(why)))
		}
		return nil, errors.Join(err, ctx.Err())
	}
	defer answer.Body.Close()
	text, err := readAnswer(answer.Body)
	switch {
	case err != nil:
		return nil, err
	case answer.StatusCode == http.StatusNotFound:
		return nil, errors.New("it is of a version that answers no questions")
	case answer.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("it answers %s: %s", answer.Status, text[:min(len(text), 200)])
	}
	return text, nil
}

// dial opens a connection for forwarded ports. The caller closes it, also at the end of ctx.
func (n *Nodes) dial(ctx context.Context, p *corev1.Pod) (httpstream.Connection, error) {
	tlsConfig, err := rest.TLSConfigFor(n.config)
	if err != nil {
		return nil, err
	}
	if tlsConfig == nil { // without one the upgrade would not verify the server
		tlsConfig = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	how := spdy.RoundTripperConfig{TLS: tlsConfig, Proxier: n.config.Proxy}
	if how.Proxier == nil {
		how.Proxier = http.ProxyFromEnvironment
	}
	if n.config.Dial != nil {
		how = spdy.RoundTripperConfig{UpgradeTransport: &http.Transport{TLSClientConfig: tlsConfig, DialContext: until(n.config.Dial)}}
	}
	upgrader, err := spdy.NewRoundTripperWithConfig(how)
	if err != nil {
		return nil, err
	}
	// The upgrade does not look at its context once it is connected, nor while it waits for a proxy.
	upgrader.Dialer = &net.Dialer{Timeout: Timeout, ControlContext: socket.EndWith(ctx)}
	authorized, err := rest.HTTPWrappersForConfig(n.config, upgrader)
	if err != nil {
		return nil, err
	}
	at := n.client.CoreV1().RESTClient().Post().Namespace(p.Namespace).Resource("pods").Name(p.Name).SubResource("portforward").URL()
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, at.String(), http.NoBody)
	if err != nil {
		return nil, err
	}
	q.Header.Set(httpstream.HeaderProtocolVersion, portforward.PortForwardProtocolV1Name)
	answer, err := (&http.Client{Transport: authorized}).Do(q)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusSwitchingProtocols {
		text, err := readAnswer(answer.Body)
		if err != nil {
			return nil, err
		}
		var status metav1.Status
		if json.Unmarshal(text, &status) == nil && status.Kind == "Status" {
			return nil, &apierrors.StatusError{ErrStatus: status}
		}
		return nil, fmt.Errorf("the API server answers %s: %s", answer.Status, text[:min(len(text), 200)])
	}
	return upgrader.NewConnection(answer)
}

type dialFunc = func(ctx context.Context, network, address string) (net.Conn, error)

// until returns dial with connections that end at the deadline of its context.
func until(dial dialFunc) dialFunc {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if end, ok := ctx.Deadline(); ok && err == nil {
			err = conn.SetDeadline(end)
		}
		return conn, err
	}
}
