package admit

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/fairlead/fairlead/internal/svc"
)

const (
	// resolveTimeout bounds the look-up of the Service of a webhook.
	resolveTimeout = 10 * time.Second
	// webhookDialTimeout bounds one try to connect to a webhook.
	webhookDialTimeout = 10 * time.Second
	// webhookStagger is the time after which the next address of a Service is tried
	// beside the one before.
	webhookStagger = 300 * time.Millisecond
	// webhookEndpoints is how many endpoints are tried at most.
	webhookEndpoints = 3

	serviceSuffix = ".svc"
)

// serviceResolver reaches the Services of webhooks: by their ClusterIP, which needs a
// proxy on this machine, or else by one of the endpoints. It looks at each call: webhooks
// are few, and a watch of all Services would cost more.
type serviceResolver struct {
	client kubernetes.Interface
	self   string // host:port at which this server is reached from its own machine
}

// ResolveEndpoint returns the URL of a port of a Service, whose host dial knows. That of
// default/kubernetes is this server: the library calls it as the server itself, by a
// configuration that does not use dial.
func (r serviceResolver) ResolveEndpoint(namespace, name string, port int32) (*url.URL, error) {
	if namespace == metav1.NamespaceDefault && name == svc.APIService && port == 443 {
		return &url.URL{Scheme: "https", Host: r.self}, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), resolveTimeout)
	defer cancel()
	s, err := r.client.CoreV1().Services(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	number := strconv.Itoa(int(port))
	if s.Spec.Type == corev1.ServiceTypeExternalName {
		return &url.URL{Scheme: "https", Host: net.JoinHostPort(s.Spec.ExternalName, number)}, nil
	}
	if _, err := portOf(s, port); err != nil {
		return nil, err
	}
	return &url.URL{Scheme: "https", Host: net.JoinHostPort(name+"."+namespace+serviceSuffix, number)}, nil
}

func portOf(s *corev1.Service, port int32) (corev1.ServicePort, error) {
	i := slices.IndexFunc(s.Spec.Ports, func(p corev1.ServicePort) bool { return p.Port == port })
	if i < 0 {
		return corev1.ServicePort{}, apierrors.NewServiceUnavailable(fmt.Sprintf("no service port %d found for service %q", port, s.Name))
	}
	return s.Spec.Ports[i], nil
}

// dial connects to a host that ResolveEndpoint has returned.
func (r serviceResolver) dial(ctx context.Context, network, address string) (net.Conn, error) {
	d := &net.Dialer{Timeout: webhookDialTimeout}
	host, number, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	parts := strings.Split(strings.TrimSuffix(host, serviceSuffix), ".")
	port, err := strconv.ParseInt(number, 10, 32)
	if len(parts) != 2 || !strings.HasSuffix(host, serviceSuffix) || err != nil {
		return d.DialContext(ctx, network, address)
	}
	addresses, err := r.addresses(ctx, parts[1], parts[0], int32(port))
	if err != nil {
		return nil, err
	}
	conn, err := dialStaggered(ctx, addresses, func(ctx context.Context, a string) (net.Conn, error) { return d.DialContext(ctx, "tcp", a) })
	if err != nil {
		return nil, fmt.Errorf("cannot reach Service %s/%s from the machine of the API server, by its ClusterIP or an endpoint "+
			"(without an agent or a proxy there, it needs a route to the endpoints): %w", parts[1], parts[0], err)
	}
	return conn, nil
}

// addresses returns where a port of a Service is reached, the best first.
func (r serviceResolver) addresses(ctx context.Context, namespace, name string, port int32) ([]string, error) {
	s, err := r.client.CoreV1().Services(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	p, err := portOf(s, port)
	if err != nil {
		return nil, err
	}
	var out []string
	if ip := s.Spec.ClusterIP; ip != "" && ip != corev1.ClusterIPNone {
		out = append(out, net.JoinHostPort(ip, strconv.Itoa(int(port))))
	}
	list, err := r.client.DiscoveryV1().EndpointSlices(namespace).List(ctx,
		metav1.ListOptions{LabelSelector: labels.Set{discoveryv1.LabelServiceName: name}.String()})
	if err != nil {
		return nil, err
	}
	var ready []string
	for _, slice := range list.Items {
		i := slices.IndexFunc(slice.Ports, func(e discoveryv1.EndpointPort) bool { return ptr.Deref(e.Name, "") == p.Name && e.Port != nil })
		if i < 0 || slice.AddressType == discoveryv1.AddressTypeFQDN {
			continue
		}
		for _, e := range slice.Endpoints {
			if ptr.Deref(e.Conditions.Ready, true) && len(e.Addresses) > 0 {
				ready = append(ready, net.JoinHostPort(e.Addresses[0], strconv.Itoa(int(*slice.Ports[i].Port))))
			}
		}
	}
	rand.Shuffle(len(ready), func(i, j int) { ready[i], ready[j] = ready[j], ready[i] })
	out = append(out, ready[:min(len(ready), webhookEndpoints)]...)
	if len(out) == 0 {
		return nil, apierrors.NewServiceUnavailable(fmt.Sprintf("no endpoints available for service %q", name))
	}
	return out, nil
}

// dialStaggered returns the first connection to one of addresses, each tried when the
// one before has failed or taken webhookStagger.
func dialStaggered(
	ctx context.Context, addresses []string, dial func(context.Context, string) (net.Conn, error),
) (net.Conn, error) {
	ctx, cancel := context.WithCancel(ctx)
	type result struct {
		conn net.Conn
		err  error
	}
	results := make(chan result)
	started, ended := 0, 0
	defer func() { // the others end with ctx
		cancel()
		for range started - ended {
			go func() {
				if r := <-results; r.conn != nil {
					r.conn.Close()
				}
			}()
		}
	}()
	start := func() {
		address := addresses[started]
		started++
		go func() {
			conn, err := dial(ctx, address)
			results <- result{conn, err}
		}()
	}
	var errs []error
	for start(); ; {
		var next <-chan time.Time
		if started < len(addresses) {
			next = time.After(webhookStagger)
		}
		select {
		case r := <-results:
			ended++
			if r.err == nil {
				return r.conn, nil
			}
			errs = append(errs, r.err)
			if ended == len(addresses) {
				return nil, errors.Join(errs...)
			}
			if started < len(addresses) {
				start()
			}
		case <-next:
			start()
		}
	}
}
