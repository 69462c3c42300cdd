// Package svc is the vocabulary of the system: names, protocols, addresses,
// endpoints and policies as small comparable value types, each with one text
// form. Every other room speaks in these types, so this one imports nothing but
// the standard library.
package svc
