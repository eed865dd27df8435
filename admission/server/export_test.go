package server

import "context"

// Checkpoint does what is otherwise done every Config.Checkpoint.
func (s *Server) Checkpoint(ctx context.Context) { s.keep(ctx) }

// FollowRules does what is otherwise done every Config.Poll.
func (s *Server) FollowRules(ctx context.Context) error { return s.rules.poll(ctx) }
