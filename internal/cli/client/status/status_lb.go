package status

import (
	"context"
	"encoding/json"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"

	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// lbSummary is the line of 'fairlead status' about load balancers.
type lbSummary struct {
	Addresses int64 `json:"addresses"`
	Pools     int   `json:"pools"`
	Pending   int   `json:"pending"`
}

// summarizeLB counts, and returns nil where there are no pools to be read.
func summarizeLB(ctx context.Context, client kubernetes.Interface, services []corev1.Service) *lbSummary {
	text, err := client.CoreV1().RESTClient().Get().AbsPath("/apis/" + v1.GroupVersion.String() + "/ipaddresspools").DoRaw(ctx)
	var pools v1.IPAddressPoolList
	if err != nil || json.Unmarshal(text, &pools) != nil {
		return nil
	}
	out := &lbSummary{Pools: len(pools.Items)}
	for _, p := range pools.Items {
		out.Addresses += p.Status.Used
	}
	for i := range services {
		s := &services[i].Spec
		ours := s.Type == corev1.ServiceTypeLoadBalancer && (s.LoadBalancerClass == nil || *s.LoadBalancerClass == svc.LoadBalancerClass)
		if ours && len(services[i].Status.LoadBalancer.Ingress) == 0 {
			out.Pending++
		}
	}
	return out
}
