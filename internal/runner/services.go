package runner

import (
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	corelisters "k8s.io/client-go/listers/core/v1"

	"github.com/fairlead/fairlead/internal/env"
)

// services are the Services of the API as Pods need them.
type services struct {
	mu     sync.Mutex
	lister corelisters.ServiceLister
	synced bool
}

// follow sets where the Services are read from, and setSynced reports that all of them are there.
func (s *services) follow(lister corelisters.ServiceLister) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lister = lister
}

func (s *services) setSynced() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.synced = true
}

func (s *services) known() (lister corelisters.ServiceLister, synced bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lister, s.synced
}

// variables returns the Service variables of a Pod that starts now.
func (s *services) variables(pod *corev1.Pod) []corev1.EnvVar {
	lister, _ := s.known()
	if lister == nil {
		return nil // a static Pod, before the API has been asked
	}
	list, err := lister.Services(pod.Namespace).List(labels.Everything())
	if err != nil {
		list = nil
	}
	if pod.Namespace != corev1.NamespaceDefault {
		if api, err := lister.Services(corev1.NamespaceDefault).Get("kubernetes"); err == nil {
			list = append(list, api)
		}
	}
	links := pod.Spec.EnableServiceLinks == nil || *pod.Spec.EnableServiceLinks
	return env.For(pod.Namespace, list, links)
}

// selected reports whether a Service selects the Pod, true if that is not known.
func (s *services) selected(pod *corev1.Pod) bool {
	lister, synced := s.known()
	if !synced {
		return true
	}
	list, err := lister.Services(pod.Namespace).List(labels.Everything())
	return err != nil || slices.ContainsFunc(list, func(s *corev1.Service) bool { return selects(s.Spec.Selector, pod.Labels) })
}

// selects reports whether labels match a selector; an empty one selects nothing.
func selects(selector, labels map[string]string) bool {
	for k, v := range selector {
		if have, ok := labels[k]; !ok || have != v {
			return false
		}
	}
	return len(selector) > 0
}
