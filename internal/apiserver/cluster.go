package apiserver

import (
	"context"
	"maps"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/join"
)

// ensureCluster publishes what nodes must have in common with this server. All servers do, at every step of a rotation.
func (s *Server) ensureCluster(ctx context.Context, client kubernetes.Interface) error {
	return contended(ctx, func() error { return s.putCluster(ctx, client) })
}

func (s *Server) putCluster(ctx context.Context, client kubernetes.Interface) error {
	data := join.Cluster{
		PodCIDRs: s.opts.PodCIDRs, ServiceCIDRs: s.opts.ServiceCIDRs, DNS: addressAt(s.opts.ServiceCIDRs, 10), Domains: s.opts.Domains,
	}.Data()
	maps.DeleteFunc(data, func(_, v string) bool { return v == "" })
	all := client.CoreV1().ConfigMaps(metav1.NamespacePublic)
	published := string(s.creds.PKI.Bundle().Published())
	have, err := all.Get(ctx, join.ClusterConfigMap, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespacePublic, Name: join.ClusterConfigMap}, Data: data}
		m.Data[join.AuthoritiesKey] = published
		_, err = all.Create(ctx, m, metav1.CreateOptions{})
		return err
	}
	if err != nil {
		return err
	}
	before := maps.Clone(have.Data)
	delete(before, join.AuthoritiesKey)
	if changed := !maps.Equal(before, data); changed {
		s.log.Warn("the cluster's ranges or domains have changed; agents use the new ones when they start again", "before", before, "now", data)
	} else if have.Data[join.AuthoritiesKey] == published {
		return nil
	}
	have.Data = data
	have.Data[join.AuthoritiesKey] = published
	_, err = all.Update(ctx, have, metav1.UpdateOptions{})
	return err
}
