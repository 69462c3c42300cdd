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
	genericrequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/fairlead/fairlead/internal/registry/proxy"
)

// NewProxy returns the subresource "proxy" of Services, which passes requests on
// to a Pod of the Service. It reads the three kinds.
func NewProxy(services, endpoints, pods rest.Getter) *proxy.REST {
	f := finder{services, endpoints, pods}
	return proxy.New("service", &corev1.ServiceProxyOptions{}, func(ctx context.Context, t proxy.Target) (url.URL, http.RoundTripper, error) {
		host, err := f.find(ctx, t)
		return url.URL{Scheme: t.Scheme, Host: host}, nil, err
	})
}

// finder finds endpoints of Services.
type finder struct{ services, endpoints, pods rest.Getter }

// find chooses an endpoint of the port that is meant.
func (f finder) find(ctx context.Context, target proxy.Target) (string, error) {
	port, err := f.portName(ctx, target)
	if err != nil {
		return "", err
	}
	obj, err := f.endpoints.Get(ctx, target.Name, &metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return "", noEndpoints(target)
	}
	if err != nil {
		return "", err
	}
	subsets := slices.Clone(obj.(*corev1.Endpoints).Subsets)
	if len(subsets) == 0 {
		return "", noEndpoints(target)
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
			if f.isPod(ctx, a) {
				return net.JoinHostPort(a.IP, strconv.Itoa(int(s.Ports[i].Port))), nil
			}
		}
	}
	return "", noEndpoints(target)
}

func noEndpoints(target proxy.Target) error {
	return apierrors.NewServiceUnavailable(fmt.Sprintf("no endpoints available for service %q", target.Name))
}

// portName is the name of the port that is meant: the one named, or the one of
// the number, or the nameless one.
func (f finder) portName(ctx context.Context, target proxy.Target) (string, error) {
	number, err := strconv.ParseInt(target.Port, 10, 32)
	if err != nil {
		return target.Port, nil
	}
	obj, err := f.services.Get(ctx, target.Name, &metav1.GetOptions{})
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

// isPod reports whether a is the address of the Pod that it names. The server
// connects to nothing else: whoever may write Endpoints could make it reach
// any address.
func (f finder) isPod(ctx context.Context, a corev1.EndpointAddress) bool {
	ref := a.TargetRef
	if ref == nil || ref.Namespace != genericrequest.NamespaceValue(ctx) || proxy.CheckAddress(a.IP) != nil {
		return false
	}
	obj, err := f.pods.Get(ctx, ref.Name, &metav1.GetOptions{})
	if err != nil {
		return false
	}
	return slices.ContainsFunc(obj.(*corev1.Pod).Status.PodIPs, func(ip corev1.PodIP) bool { return ip.IP == a.IP })
}
