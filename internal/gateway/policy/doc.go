// Package policy is what a rule of a route says about requests that fail: how often they go to a backend again. It is pure.
package policy
