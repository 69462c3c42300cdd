package pod

import (
	"context"
	"net"
	"net/http"
	"net/url"
	"strconv"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/registry/proxy"
)

// locateProcess finds where a request to the proxy of a Pod goes: to the port
// that is named, or the first one.
func (s *streams) locateProcess(ctx context.Context, t proxy.Target) (url.URL, http.RoundTripper, error) {
	p, err := s.get(ctx, t.Name)
	if err != nil {
		return url.URL{}, nil, err
	}
	if t.Port == "" {
		t.Port = firstPort(p)
	}
	return url.URL{Scheme: t.Scheme, Host: net.JoinHostPort(p.Status.PodIP, t.Port)}, nil, proxy.CheckAddress(p.Status.PodIP)
}

// firstPort is the first port that a container of p names, else that of HTTP.
func firstPort(p *corev1.Pod) string {
	for _, c := range p.Spec.Containers {
		if len(c.Ports) > 0 {
			return strconv.Itoa(int(c.Ports[0].ContainerPort))
		}
	}
	return "80"
}
