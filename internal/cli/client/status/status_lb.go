package status

import (
	"context"
	"encoding/json"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"

	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// lbSummary is the line of 'fairlead status' about load balancers.
type lbSummary struct {
	Addresses int64 `json:"addresses"`
	Pools     int   `json:"pools"`
	Pending   int   `json:"pending"`
	// NotAnnounceable has the pools with addresses that no node can announce, and why.
	NotAnnounceable []poolTrouble `json:"notAnnounceable,omitempty"`
}

// poolTrouble is the condition Announceable of a pool, with the remedy.
type poolTrouble struct {
	Pool    string `json:"pool"`
	Message string `json:"message"`
}

// summarizeLB counts, and returns nil where there are no pools to be read.
func summarizeLB(ctx context.Context, client kubernetes.Interface, services []corev1.Service) *lbSummary {
	text, err := client.CoreV1().RESTClient().Get().AbsPath("/apis/"+v1.GroupVersion.String()+"/ipaddresspools").
		SetHeader("Accept", runtime.ContentTypeJSON).DoRaw(ctx)
	var pools v1.IPAddressPoolList
	if err != nil || json.Unmarshal(text, &pools) != nil {
		return nil
	}
	return summaryOf(pools.Items, services)
}

func summaryOf(pools []v1.IPAddressPool, services []corev1.Service) *lbSummary {
	out := &lbSummary{Pools: len(pools)}
	for i := range pools {
		p := &pools[i]
		out.Addresses += p.Status.Used
		if c := meta.FindStatusCondition(p.Status.Conditions, v1.PoolAnnounceable); c != nil && c.Status == metav1.ConditionFalse {
			out.NotAnnounceable = append(out.NotAnnounceable, poolTrouble{p.Name, c.Message})
		}
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

// judgePools adds pools with addresses that no node can announce.
func (r *Report) judgePools() {
	if r.LoadBalancers == nil {
		return
	}
	for _, p := range r.LoadBalancers.NotAnnounceable {
		r.problem("pool %s: %s", p.Pool, p.Message)
	}
}
