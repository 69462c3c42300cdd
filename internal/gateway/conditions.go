package gateway

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// condition returns a condition without a time, which belongs to who writes it.
func condition[T, R ~string](kind T, is bool, reason R, generation int64, message string) metav1.Condition {
	status := metav1.ConditionFalse
	if is {
		status = metav1.ConditionTrue
	}
	return metav1.Condition{Type: string(kind), Status: status, Reason: string(reason), Message: message, ObservedGeneration: generation}
}

// valueOf returns what a pointer leads to, or a default.
func valueOf[T any](p *T, or T) T {
	if p == nil {
		return or
	}
	return *p
}
