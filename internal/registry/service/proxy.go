package service

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	genericrequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/fairlead/fairlead/internal/registry/proxy"
)

// Proxy passes requests to services/[SCHEME:]NAME[:PORT]/proxy/PATH on to a
// Pod of the Service.
type Proxy struct {
	services, endpoints, pods rest.Getter
	transport                 *http.Transport
}

var _ rest.Connecter = (*Proxy)(nil)

// NewProxy returns the subresource. It reads the three kinds.
func NewProxy(services, endpoints, pods rest.Getter) *Proxy {
	return &Proxy{services, endpoints, pods, proxy.NewTransport()}
}

// New returns the options of the subresource.
func (*Proxy) New() runtime.Object { return &corev1.ServiceProxyOptions{} }

// Destroy closes connections that no request uses.
func (p *Proxy) Destroy() { p.transport.CloseIdleConnections() }

// ConnectMethods are the HTTP methods passed on.
func (*Proxy) ConnectMethods() []string { return proxy.Methods() }

// NewConnectOptions says that the rest of the path is an option.
func (*Proxy) NewConnectOptions() (runtime.Object, bool, string) {
	return &corev1.ServiceProxyOptions{}, true, "path"
}

// Connect returns the handler of one request.
func (p *Proxy) Connect(ctx context.Context, id string, options runtime.Object, responder rest.Responder) (http.Handler, error) {
	o, ok := options.(*corev1.ServiceProxyOptions)
	if !ok {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("wrong options: %T", options))
	}
	target, err := proxy.Parse("service", id)
	if err != nil {
		return nil, err
	}
	host, err := p.find(ctx, target, id)
	if err != nil {
		return nil, err
	}
	return proxy.Handler(url.URL{Scheme: target.Scheme, Host: host}, o.Path, p.transport, responder), nil
}

// find chooses an endpoint of the port that is meant; id is how the request
// names both.
func (p *Proxy) find(ctx context.Context, target proxy.Target, id string) (string, error) {
	port, err := p.portName(ctx, target)
	if err != nil {
		return "", err
	}
	obj, err := p.endpoints.Get(ctx, target.Name, &metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	subsets := slices.Clone(obj.(*corev1.Endpoints).Subsets)
	if len(subsets) == 0 {
		return "", apierrors.NewServiceUnavailable(fmt.Sprintf("no endpoints available for service %q", target.Name))
	}
	rand.Shuffle(len(subsets), func(i, j int) { subsets[i], subsets[j] = subsets[j], subsets[i] })
	for _, s := range subsets {
		i := slices.IndexFunc(s.Ports, func(e corev1.EndpointPort) bool { return e.Name == port })
		if i < 0 {
			continue
		}
		// From a random one on: nearly always the first is a live Pod.
		for n, first := 0, rand.IntN(len(s.Addresses)+1); n < len(s.Addresses); n++ {
			a := s.Addresses[(first+n)%len(s.Addresses)]
			if p.isPod(ctx, a) {
				return net.JoinHostPort(a.IP, strconv.Itoa(int(s.Ports[i].Port))), nil
			}
		}
	}
	return "", apierrors.NewServiceUnavailable(fmt.Sprintf("no endpoints available for service %q", id))
}

// portName is the name of the port that is meant: the one named, or the one of
// the number, or the nameless one.
func (p *Proxy) portName(ctx context.Context, target proxy.Target) (string, error) {
	number, err := strconv.ParseInt(target.Port, 10, 32)
	if err != nil {
		return target.Port, nil
	}
	obj, err := p.services.Get(ctx, target.Name, &metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	for _, sp := range obj.(*corev1.Service).Spec.Ports {
		if int64(sp.Port) == number {
			return sp.Name, nil
		}
	}
	return "", apierrors.NewServiceUnavailable(fmt.Sprintf("no service port %d found for service %q", number, target.Name))
}

// isPod says whether a is the address of the Pod that it names. The server
// connects to nothing else: whoever may write Endpoints could make it reach
// any address.
func (p *Proxy) isPod(ctx context.Context, a corev1.EndpointAddress) bool {
	ref := a.TargetRef
	if ref == nil || ref.Namespace != genericrequest.NamespaceValue(ctx) || proxy.CheckAddress(a.IP) != nil {
		return false
	}
	obj, err := p.pods.Get(ctx, ref.Name, &metav1.GetOptions{})
	if err != nil {
		return false
	}
	return slices.ContainsFunc(obj.(*corev1.Pod).Status.PodIPs, func(ip corev1.PodIP) bool { return ip.IP == a.IP })
}
