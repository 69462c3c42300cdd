package main

import (
	"bytes"
	"context"
	"fmt"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes/scheme"
)

// seedBatch is how many objects are written in one transaction of etcd, whose
// limit is 128 operations.
const seedBatch = 120

// seed makes the crowd right in the store: by way of the API 100,000 Pods would
// take longer than everything that is measured.
func (s *stage) seed(ctx context.Context) error {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: podNode}}
	if _, err := s.client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{}); err != nil {
		return err
	}
	return s.store(ctx, func(store *clientv3.Client) error {
		var batch []clientv3.Op
		put := func(kind string, o interface {
			runtime.Object
			metav1.Object
		}) error {
			text, err := encode(o)
			if err != nil {
				return err
			}
			batch = append(batch, clientv3.OpPut("/registry/"+kind+"/"+benchNamespace+"/"+o.GetName(), text))
			if len(batch) < seedBatch {
				return nil
			}
			_, err = store.Txn(ctx).Then(batch...).Commit()
			batch = nil
			return err
		}
		for i := range s.size.services {
			if err := put("services", seeded(selectingService(i), "service", i)); err != nil {
				return err
			}
			if i >= s.size.withPods() {
				continue
			}
			for j := range s.size.pods {
				n := i*s.size.pods + j
				if err := put("pods", seeded(readyPod(i, podName(i, j), n), "pod", n)); err != nil {
					return err
				}
			}
		}
		_, err := store.Txn(ctx).Then(batch...).Commit()
		return err
	})
}

// store opens the etcd inside the API server, which listens on a socket in its
// data directory.
func (s *stage) store(ctx context.Context, f func(*clientv3.Client) error) error {
	store, err := clientv3.New(clientv3.Config{Endpoints: []string{"unix://" + s.socket()}, Context: ctx, DialTimeout: 10 * time.Second})
	if err != nil {
		return err
	}
	defer store.Close()
	return f(store)
}

// wipe removes all slices and Endpoints from the store, so that a manager starts
// from nothing.
func (s *stage) wipe(ctx context.Context) error {
	return s.removeAll(ctx, "discovery.k8s.io/endpointslices", "services/endpoints", "endpoints")
}

// clear removes the Services and Pods as well.
func (s *stage) clear(ctx context.Context) error {
	if err := s.removeAll(ctx, "pods", "services"); err != nil {
		return err
	}
	return s.wipe(ctx)
}

func (s *stage) removeAll(ctx context.Context, kinds ...string) error {
	return s.store(ctx, func(store *clientv3.Client) error {
		for _, kind := range kinds {
			if _, err := store.Delete(ctx, "/registry/"+kind+"/"+benchNamespace+"/", clientv3.WithPrefix()); err != nil {
				return err
			}
		}
		return nil
	})
}

// encode is how an API server stores an object.
func encode(o runtime.Object) (string, error) {
	info := protobuf.NewSerializer(scheme.Scheme, scheme.Scheme)
	var out bytes.Buffer
	err := scheme.Codecs.EncoderForVersion(info, corev1.SchemeGroupVersion).Encode(o, &out)
	return out.String(), err
}

// seeded adds what an API server would have filled in.
func seeded[T metav1.Object](o T, kind string, n int) T {
	o.SetUID(types.UID(fmt.Sprintf("00000000-0000-4000-8000-%06x%06x", len(kind), n)))
	o.SetCreationTimestamp(metav1.Now())
	return o
}

// selectingService is headless, so that no address has to be claimed for it.
func selectingService(i int) *corev1.Service {
	single := corev1.IPFamilyPolicySingleStack
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: appName(i), Namespace: benchNamespace},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: corev1.ClusterIPNone, ClusterIPs: []string{corev1.ClusterIPNone},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol}, IPFamilyPolicy: &single, SessionAffinity: corev1.ServiceAffinityNone,
			Selector: map[string]string{"app": appName(i)},
			Ports: []corev1.ServicePort{{
				Name: "http", Protocol: corev1.ProtocolTCP, Port: servicePort, TargetPort: intstr.FromInt32(backendPort),
			}},
		},
	}
}

// readyPod is a Pod of Service number i with the endpoint address of that
// number.
func readyPod(i int, name string, address int) *corev1.Pod {
	ip := endpointAddr(uint32(address)).String()
	grace := int64(30)
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: benchNamespace, Labels: map[string]string{"app": appName(i)}},
		Spec: corev1.PodSpec{
			NodeName: podNode, RestartPolicy: corev1.RestartPolicyAlways, DNSPolicy: corev1.DNSClusterFirst, TerminationGracePeriodSeconds: &grace,
			SchedulerName: corev1.DefaultSchedulerName, SecurityContext: &corev1.PodSecurityContext{},
			Containers: []corev1.Container{{
				Name: "main", Image: "host", ImagePullPolicy: corev1.PullIfNotPresent,
				TerminationMessagePath: corev1.TerminationMessagePathDefault, TerminationMessagePolicy: corev1.TerminationMessageReadFile,
			}},
		},
		Status: corev1.PodStatus{
			Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}}, Conditions: readiness(true),
		},
	}
}

func appName(i int) string    { return fmt.Sprintf("app-%d", i) }
func podName(i, j int) string { return fmt.Sprintf("app-%d-%d", i, j) }

func readiness(ready bool) []corev1.PodCondition {
	status := corev1.ConditionFalse
	if ready {
		status = corev1.ConditionTrue
	}
	return []corev1.PodCondition{{Type: corev1.PodReady, Status: status, LastTransitionTime: metav1.Now()}}
}
